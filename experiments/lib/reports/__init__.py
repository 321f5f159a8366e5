"""Tables and figures of the studies, computed from their runs."""
