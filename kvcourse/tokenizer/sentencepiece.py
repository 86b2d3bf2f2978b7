"""SentencePiece BPE, the tokenizer of Llama 2 and Mistral: text becomes characters, and of all neighboring pairs that
are a token together, the one with the best score is merged, again and again."""

from heapq import heapify, heappop, heappush

from kvcourse.tokenizer.spelling import SPACE
from kvcourse.tokenizer.text import no_token_for


class ScoredMerges:
    """`ids` and `scores` of the tokens that can be merged; `byte_ids`: ids of the tokens that are one byte."""

    def __init__(self, ids: dict[str, int], scores: dict[str, float], byte_ids: dict[int, int]):
        self.ids, self.scores, self.byte_ids = ids, scores, byte_ids

    def __call__(self, text: str) -> list[int]:
        return [id for piece in self.pieces(text.replace(" ", SPACE)) for id in self.ids_of(piece)]

    def ids_of(self, piece: str) -> list[int]:
        """One token; a character that is none is spelled by its bytes."""
        if piece in self.ids:
            return [self.ids[piece]]
        data = piece.encode()
        if not all(byte in self.byte_ids for byte in data):
            raise no_token_for(piece)
        return [self.byte_ids[byte] for byte in data]

    def pieces(self, text: str) -> list[str]:
        """Best score first, the leftmost of equals (src/bpe_model.cc in SentencePiece, `llm_tokenizer_spm_session` in
        llama.cpp). A heap holds the possible merges, so n characters cost about n log n steps."""
        pieces = [*text, ""]  # a piece that was merged into the one on its left is "", and so is the end
        left, right = list(range(-1, len(text))), list(range(1, len(text) + 2))

        def offers(i: int):
            if i >= 0 and (merged := pieces[i] + pieces[right[i]]) in self.scores and pieces[right[i]]:
                yield -self.scores[merged], i, merged

        heap = [offer for i in range(len(text)) for offer in offers(i)]
        heapify(heap)
        while heap:
            _, i, merged = heappop(heap)
            j = right[i]
            if not pieces[i] or not pieces[j] or pieces[i] + pieces[j] != merged:
                continue  # one of the two was merged with something else meanwhile
            pieces[i], pieces[j] = merged, ""
            right[i] = right[j]
            left[right[i]] = i
            for offer in (*offers(left[i]), *offers(i)):
                heappush(heap, offer)
        return [piece for piece in pieces if piece]
