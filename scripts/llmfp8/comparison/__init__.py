"""Parts of scripts/compare: which runs, measuring them in turn, what their logs say, the tables and plots."""
