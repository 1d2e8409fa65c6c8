"""Parts of scripts/compare: the choice of runs, alternating measurements, their logs, the tables and the page."""
