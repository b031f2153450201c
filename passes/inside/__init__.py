"""Operations that reduce inside: normalisations, softmax, cross entropy, lookup. Cut, each becomes smaller ones with its own all_reduce."""
