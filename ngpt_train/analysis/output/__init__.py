"""The files of `analyze`: numbers, pictures and a page."""
