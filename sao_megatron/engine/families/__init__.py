"""What a CPU engine sets SGLANG_EXTERNAL_MODEL_PACKAGE to.

SGLang looks for a model's class in the modules of this package first. Otherwise it imports every model that it has:
4 of the 10 seconds that an engine's start takes on a CPU. Models that are not here are found as always.
"""
