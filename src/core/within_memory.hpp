// Public functions that return errors as values do so where memory runs out, too.
#pragma once

#include <new>

#include "latte/status.hpp"

namespace latte {

// What `body` returns, a Status or a Result. The texts are short enough to need no memory themselves.
template <class Body>
auto within_memory(const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, "memory", "enough of it", "too little");
  }
}

}  // namespace latte
