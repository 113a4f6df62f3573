# The sources of tandem_kernels that are compiled per instruction set, and `kernels/built_isas.h`, which
# tells the others which there are. Included by CMakeLists.txt.

# Ascending; each kind of kernel has the variants in which it differs.
set(packed_isas avx2 avx512_bw avx512_vnni avx512_bf16 amx)
set(attention_isas avx2 avx512_bw avx512_bf16)
set(row_ops_isas avx2 avx512_bw)
set(sampling_isas avx2 avx512_bw)
set(recurrent_isas avx2 avx512_bw)
set(state_space_isas avx2 avx512_bw)
set(kinds packed attention row_ops sampling recurrent state_space)

# Without contraction every ISA rounds alike: a fused multiply-add is where the source says so.
set(plain "-ffp-contract=off;-Wno-psabi")
set(amx_emulated "${plain}")
# The vectors of 64 bytes never cross a call, so their calling convention does not matter.
set(avx2 "${plain};-mavx2;-mfma;-mf16c")
if(TANDEM_SANITIZE MATCHES "undefined")
  # Its checks in hundreds of unrolled blocks take minutes to compile, and the plain variant, which
  # keeps them, has the same body.
  list(APPEND avx2 -fno-sanitize=undefined)
elseif(TANDEM_SANITIZE STREQUAL "thread")
  # The plain variant, again, tells who shares what with whom.
  list(APPEND avx2 -fno-sanitize=thread)
endif()
set(avx512_bw "${avx2};-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 warns of its own _mm512_undefined_ps (GCC bug 105593).
  list(APPEND avx512_bw -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
if(TANDEM_SANITIZE MATCHES "address")
  # Five minutes to compile, each of them and of what follows; AVX2 has the same bodies.
  list(APPEND avx512_bw -fno-sanitize=address)
endif()
set(avx512_vnni "${avx512_bw};-mavx512vnni")
set(avx512_bf16 "${avx512_vnni};-mavx512bf16;-mavx512vbmi")
set(amx "${avx512_bf16};-mamx-tile;-mamx-int8;-mamx-bf16")

# Sets `out` to the ISAs that this machine runs and that are chosen without being named (AMX is not),
# ascending; the same conditions as in kernels/vectors/isa.cc.
function(detect_isas out)
  set(found "")
  file(STRINGS /proc/cpuinfo flags REGEX "^flags" LIMIT_COUNT 1)
  string(REGEX REPLACE "^[^:]*: *" "" flags "${flags}")
  string(REPLACE " " ";" flags "${flags}")
  set(avx2_flags avx2 fma f16c)
  set(avx512_bw_flags avx512f avx512bw avx512vl avx512dq)
  set(avx512_vnni_flags avx512_vnni)
  set(avx512_bf16_flags avx512_bf16 avx512vbmi)
  foreach(isa IN ITEMS avx2 avx512_bw avx512_vnni avx512_bf16)
    foreach(flag IN LISTS ${isa}_flags)
      if(NOT flag IN_LIST flags)
        set(${out} "${found}" PARENT_SCOPE)
        return()
      endif()
    endforeach()
    list(APPEND found ${isa})
  endforeach()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

if(NOT TANDEM_KERNEL_ISAS MATCHES "^(native|all|test)$")
  message(FATAL_ERROR "TANDEM_KERNEL_ISAS is ${TANDEM_KERNEL_ISAS}: give native, all or test")
endif()
if(TANDEM_BUILD_TESTS AND NOT TANDEM_KERNEL_ISAS STREQUAL "test")
  message(FATAL_ERROR "The native tests compare all variants: pass -DTANDEM_KERNEL_ISAS=test")
endif()
set(is_x86 OFF)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(is_x86 ON)
endif()
if(TANDEM_KERNEL_ISAS STREQUAL "native" AND is_x86)
  detect_isas(machine_isas)
endif()

set(built_isas "")
foreach(kind IN LISTS kinds)
  set(isas ${${kind}_isas})
  if(NOT is_x86)
    set(isas "")
  elseif(TANDEM_KERNEL_ISAS STREQUAL "native")
    # The widest one that the machine runs.
    set(widest "")
    foreach(isa IN LISTS isas)
      if(isa IN_LIST machine_isas)
        set(widest ${isa})
      endif()
    endforeach()
    set(isas ${widest})
  endif()
  if(kind STREQUAL "packed" AND TANDEM_KERNEL_ISAS STREQUAL "test")
    list(APPEND isas amx_emulated)
  endif()
  foreach(isa IN ITEMS plain LISTS isas)
    set(source kernels/${kind}/${kind}_${isa}.cc)
    target_sources(tandem_kernels PRIVATE ${source})
    set_source_files_properties(${source} PROPERTIES
      COMPILE_OPTIONS "${${isa}}" SKIP_UNITY_BUILD_INCLUSION ON)
    string(TOUPPER "TANDEM_BUILT_${kind}_${isa}" macro)
    string(APPEND built_isas "#define ${macro} 1\n")
  endforeach()
endforeach()
# Choosing rounds as the plain variant does.
set_source_files_properties(kernels/sampling/sampling.cc PROPERTIES COMPILE_OPTIONS "${plain}")
file(CONFIGURE OUTPUT kernels/built_isas.h CONTENT
  "// Which variants of the kernels this build has. Written by kernel_isas.cmake.\n#pragma once\n\n@built_isas@"
  @ONLY)
