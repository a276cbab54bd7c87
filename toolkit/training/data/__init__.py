"""From files to the rows a model trains on: read, recognise, tokenise, pack, batch."""
