// GMAC (NIST SP 800-38D) with AES-256, by the system's libcrypto. It is looked for at run time: the
// build needs no header of it, and a machine without it does without GMAC.
#pragma once

#include <memory>

#include "transfer/records/tag.h"

namespace tandem::transfer {

// A libcrypto was found, and gives the tag that the standard's test vector has.
bool has_gmac();
// nullptr where has_gmac() is false, or on a failure of the library.
std::unique_ptr<Tagger> make_gmac(const Digest& key);

}  // namespace tandem::transfer
