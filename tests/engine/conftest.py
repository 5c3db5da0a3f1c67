"""Puts this folder on the import path for the test folders below it: their helpers lie here."""
