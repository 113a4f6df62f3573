// GMAC (NIST SP 800-38D) with AES-256, by the system's libcrypto. It is loaded at run time: the
// build needs no header of it, and a machine without it uses no GMAC.
#pragma once

#include <memory>

#include "transfer/records/tag.h"

namespace tandem::transfer {

// True if a libcrypto was found that computes the standard's test vector.
bool has_gmac();
// Returns nullptr if has_gmac() is false, or if the library fails.
std::unique_ptr<Tagger> make_gmac(const Digest& key);

}  // namespace tandem::transfer
