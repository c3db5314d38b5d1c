"""Peers: runs that train on their own and meet over slow links every H steps."""
