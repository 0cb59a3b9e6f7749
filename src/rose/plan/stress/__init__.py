"""Which arrivals hurt serving most because its devices are lent? A search, and what it found.

`pattern` makes arrivals from a few numbers, `trial` simulates them lent and alone, `search` looks
for the worst, `cases` keeps them.
"""
