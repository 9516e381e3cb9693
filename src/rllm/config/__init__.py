"""Config: the typed tree, where its values come from, and other tools' spellings of its keys."""
