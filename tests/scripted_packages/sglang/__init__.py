"""Part of a scripted SGLang."""
