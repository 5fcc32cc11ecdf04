# Headers, both libraries, CMake package, pkg-config file, program, man page.
include(CMakePackageConfigHelpers)

set(latte_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/latte")

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/latte" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(TARGETS latte_shared EXPORT latte-shared-targets)
install(TARGETS latte EXPORT latte-static-targets)
install(EXPORT latte-shared-targets NAMESPACE latte:: DESTINATION "${latte_package_dir}")
install(EXPORT latte-static-targets NAMESPACE latte:: DESTINATION "${latte_package_dir}")

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/latte-config.cmake.in"
                              "${PROJECT_BINARY_DIR}/package/latte-config.cmake" INSTALL_DESTINATION
                              "${latte_package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/package/latte-config-version.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/package/latte-config.cmake"
              "${PROJECT_BINARY_DIR}/package/latte-config-version.cmake" DESTINATION "${latte_package_dir}")

# The file finds its prefix from where it lies, so that an installed tree can be moved.
file(RELATIVE_PATH latte_pc_prefix "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" /prefix)
string(REGEX REPLACE "/$" "" latte_pc_prefix "${latte_pc_prefix}")
set(latte_pc_cuda "")
if(LATTE_HAS_CUDA)
  set(latte_pc_cuda "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt ")
endif()
# Two packages: both libraries lie in one directory, where -llatte is always the shared one.
set(latte_pc_name latte)
set(latte_pc_libs "-L\${libdir} -llatte")
configure_file("${PROJECT_SOURCE_DIR}/cmake/latte.pc.in" "${PROJECT_BINARY_DIR}/package/latte.pc" @ONLY)
set(latte_pc_name latte-static)
set(latte_pc_libs "\${libdir}/liblatte.a ${latte_pc_cuda}-pthread -lstdc++ -lm")
configure_file("${PROJECT_SOURCE_DIR}/cmake/latte.pc.in" "${PROJECT_BINARY_DIR}/package/latte-static.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/package/latte.pc" "${PROJECT_BINARY_DIR}/package/latte-static.pc"
        DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")

if(LATTE_BUILD_PROGRAM)
  install(TARGETS latte_program)
  install(FILES "${PROJECT_SOURCE_DIR}/docs/latte.1" DESTINATION "${CMAKE_INSTALL_MANDIR}/man1")
endif()
