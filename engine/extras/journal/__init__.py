"""The journal of a run (`zstore.journal`): a line of JSON for each step, save and load. See [Note: the journal] there."""
