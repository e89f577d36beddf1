# A library with every instruction set's path; which one runs is chosen when it is loaded.
find_package(Threads REQUIRED)
add_library(kernels STATIC
  kernels/experts.cpp kernels/mapping.cpp kernels/paths.cpp kernels/path_portable.cpp kernels/pool.cpp
  kernels/read_memory.cpp)
target_compile_features(kernels PUBLIC cxx_std_17)
# A product and a sum may become one operation (as everywhere on ARM); nothing else is reordered.
target_compile_options(kernels PUBLIC -fvisibility=hidden -ffp-contract=fast -Wall -Wextra -Wno-psabi)
if(NOT OVERSPILL_SANITIZE)
  target_compile_options(kernels PUBLIC -O3)
endif()
target_link_libraries(kernels PUBLIC Threads::Threads)
set_target_properties(kernels PROPERTIES POSITION_INDEPENDENT_CODE ON)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  target_sources(kernels PRIVATE kernels/path_avx2.cpp kernels/path_avx512.cpp)
  target_compile_definitions(kernels PUBLIC OVERSPILL_X86)
  set_source_files_properties(kernels/path_avx2.cpp PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c")
  set(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)
  # gcc 12's own header has variables that are uninitialized on purpose.
  set_source_files_properties(kernels/path_avx512.cpp PROPERTIES COMPILE_OPTIONS
    "${avx512};-Wno-uninitialized;-Wno-maybe-uninitialized")
endif()
