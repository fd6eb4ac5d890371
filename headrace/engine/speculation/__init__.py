"""Drafting ahead: how drafts are drawn, checked and accepted."""
