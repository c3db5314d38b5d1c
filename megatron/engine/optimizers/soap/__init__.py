"""SOAP."""
