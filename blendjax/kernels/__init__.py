"""Operations on paged KV. Letters of the shape suffixes, everywhere in kernels/ and model/:

N step tokens   B sequences     D model         F ffn hidden    V vocab        L layers
H query heads   K kv heads      G = H // K      E head dim      J = E // 2     T kv length
M pool pages    S slots a page  P pages a seq   C page copies   Q tile rows    X banned ids

Heads, F and V are local to a TP shard. M counts the pages of all layers: `layer * pages + page`.
"""
