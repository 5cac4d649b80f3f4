"""The machine and process that nva runs in, without torch: where files are kept, what is told to
the user, how many cores there are, and what a fork needs.

The law: nothing here imports torch or another part of nva. Read next: any file, each is alone."""
