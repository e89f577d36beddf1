set(sanitizers -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1
  -Wno-maybe-uninitialized)  # gcc 12 warns of what is not so
target_compile_options(kernels PUBLIC ${sanitizers})
target_link_options(kernels PUBLIC ${sanitizers})
add_executable(check kernels/check.cpp)
target_link_libraries(check PRIVATE kernels)
