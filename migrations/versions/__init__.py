"""One file a revision, named ``NNNN_subject.py``: the number is the revision, each follows the one before."""
