// What g++'s headers call and the libraries of manylinux_2_28 lack, to be linked statically into each library of the
// wheel, as Red Hat's toolsets do it (libstdc++_nonshared.a).
#include <new>
#include <sstream>

// glibc 2.32: a hint that atomic operations can be left out.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace std {

void __throw_bad_array_new_length();  // GLIBCXX_3.4.29
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

template basic_ostringstream<char>::basic_ostringstream();  // GLIBCXX_3.4.26
template basic_stringstream<char>::basic_stringstream();    // GLIBCXX_3.4.26
template string basic_stringbuf<char>::str() const&;        // GLIBCXX_3.4.29, as are the others of C++20
template string basic_ostringstream<char>::str() const&;
template string basic_stringstream<char>::str() const&;

}  // namespace std
