"""Why the method works: statistics of a model's attention, hidden states and sizes (Figs 2, 4, 5, 7, 20, Table 1).

Each is taken in one dense pass, from chunks of query rows; what is kept is linear in the length.
"""
