"""Sparse weight sync: only the cells whose bits changed travel, and the receiver ends with the very same bits.

After *Understanding and Exploiting Weight Update Sparsity for Communication-Efficient Distributed RL*
(arXiv:2602.03839). Needs ``pip install 'dist-lib[pulse]'`` where it codes, stores or signs.
"""
