"""Where steps are kept and read from: one small interface, one file per implementation."""
