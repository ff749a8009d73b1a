"""Vocabularies of foreign contracts that more than one surface speaks."""
