"""A stand-in for github.com/Belilovsky-Lab/pylo, which no index of packages has: what is used of its interface, with
small_fc_lopt (arXiv 2203.11860, appendix) written again. A real one comes before it in `sys.path`.
"""
