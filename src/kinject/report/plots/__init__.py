"""The figures of every report. Importing this loads no matplotlib: it is imported where it is needed."""
