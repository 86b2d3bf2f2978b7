"""The corpus of the course's own models: short English stories that ask later for what they said before.

    words.txt, words    the vocabulary, and how English words are inflected
    facts               what a story can be asked about
    fillers, shapes     the other sentences, as templates; how a story begins, goes on and ends
    sentences           templates become sentences, each story from a small palette of words
    page                a text that grows, and remembers where each answer stands
    tales, litanies     the two forms of text: stories, and facts said again and again
    probes              questions at an exact distance, to measure what a model remembers
    grammar             which sentences these stories can have, to measure how a model writes

Everything follows from seeds; nothing here needs torch.
"""
