"""The page of scripts/report: a log read in a stream, reduced to what a screen shows, written as one file."""
