"""The CustomResourceDefinitions as files, written by ``python -m app.api.crds``. Data, no code."""
