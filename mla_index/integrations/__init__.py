"""Faces for the engines that people run: vLLM's names, and the plugin that puts them in place."""
