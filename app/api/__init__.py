"""What users see: the kinds, their keys and words, and the CRDs made from them. Imports nothing of ours."""
