"""Why the method works: statistics of a model's attention, hidden states and sizes (Figs 2, 4, 5, 7, 20, Table 1).

Each comes from one dense pass, in chunks of query tokens. Memory is linear in the length.
"""
