/* Copies between the pages of a pool in host memory and wire bytes, with the digest in the same pass.
 *
 * A step copies at most STEP_BYTES and digests them while they are in the first-level cache. Stores to large targets bypass the
 * caches. The GIL is released for a whole call. `transfer.copy.compiled_copy` makes the arguments and checks every one of
 * them: addresses are used as they are.
 *
 * The digests are those of transfer/copy/digest.py, bit for bit. Both work on stripes of 64 bytes of the wire.
 *
 * The wire of a scatter can be memory that a hostile peer changes at any time. So a scatter with a digest loads each byte of the wire
 * once, and copies and digests this one value. The barriers keep the compiler from loading it again. The pool of a gather is memory of
 * this process, and its wire is of no further use if a peer has changed it.
 * Source of XXH3: github.com/Cyan4973/xxHash, doc/xxhash_spec.md, 64 bits, seed 0, inputs longer than 240 bytes.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define WITH_AVX2 __attribute__((target("avx2")))
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words of the digests are little-endian; this machine is not"
#endif

enum { STRIPE = 64, STRIPES_PER_BLOCK = 16, STEP_BYTES = STRIPE * STRIPES_PER_BLOCK, PREFETCH_BYTES = 2048 };
enum { NO_DIGEST, XXH3, WORDS };

/* One buffer of a plan: where its page 0 begins, where its bytes begin in the wire, how its pieces lie, and which tokens move.
 * The order is that of `compiled_copy._BUFFER_FIELDS`. */
typedef struct {
    int64_t pool, wire, page_stride, token_stride, num_pieces, piece_stride, piece_bytes, begin, end;
} Buffer;

typedef struct {
    char *wire;
    int64_t position;   /* bytes of the wire that are copied */
    int64_t num_stripes; /* that are digested */
    int64_t max_stripes; /* of XXH3 the last bytes count as a stripe of their own */
    int algorithm, is_gather, is_streaming, has_avx2;
    uint64_t lanes[8];  /* of XXH3 its accumulators, of words their sum in lane 0 */
    char seen[STRIPE + STEP_BYTES]; /* of a scatter: the last stripe of the step before, and the bytes of this step */
} Copy;

/* XXH3 */

static const uint64_t PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87u, PRIME64_2 = 0xC2B2AE3D27D4EB4Fu, PRIME64_3 = 0x165667B19E3779F9u;
static const uint64_t PRIME64_4 = 0x85EBCA77C2B2AE63u, PRIME64_5 = 0x27D4EB2F165667C5u;
enum { LAST_STRIPE_SECRET = 121, SCRAMBLE_SECRET = 128, MERGE_SECRET = 11 };

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t word_at(const void *place) {
    uint64_t word;
    memcpy(&word, place, sizeof word);
    return word;
}

static inline void accumulate(uint64_t *lanes, const char *stripe, const uint8_t *secret) {
    for (int i = 0; i < 8; i++) {
        uint64_t word = word_at(stripe + 8 * i), keyed = word ^ word_at(secret + 8 * i);
        lanes[i ^ 1] += word;
        lanes[i] += (keyed & 0xffffffffu) * (keyed >> 32);
    }
}

static void scramble(uint64_t *lanes) {
    for (int i = 0; i < 8; i++)
        lanes[i] = (lanes[i] ^ (lanes[i] >> 47) ^ word_at(SECRET + SCRAMBLE_SECRET + 8 * i)) * PRIME32_1;
}

#if defined(WITH_AVX2)
WITH_AVX2 static inline __m256i half_accumulated(__m256i lanes, __m256i word, const uint8_t *secret) {
    __m256i keyed = _mm256_xor_si256(word, _mm256_loadu_si256((const __m256i *)secret));
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    return _mm256_add_epi64(lanes, _mm256_add_epi64(product, _mm256_shuffle_epi32(word, 0x4e)));
}

WITH_AVX2 static void accumulate_avx2(uint64_t *lanes, const char *stripes, int64_t count, const uint8_t *secret) {
    __m256i low = _mm256_loadu_si256((const __m256i *)lanes), high = _mm256_loadu_si256((const __m256i *)(lanes + 4));
    for (int64_t i = 0; i < count; i++, stripes += STRIPE, secret += 8) {
        low = half_accumulated(low, _mm256_loadu_si256((const __m256i *)stripes), secret);
        high = half_accumulated(high, _mm256_loadu_si256((const __m256i *)(stripes + 32)), secret + 32);
    }
    _mm256_storeu_si256((__m256i *)lanes, low);
    _mm256_storeu_si256((__m256i *)(lanes + 4), high);
}
#endif

/* `count` stripes of one block; the first is number `index` of it. */
static void accumulate_all(Copy *copy, const char *stripes, int64_t count, int64_t index) {
#if defined(WITH_AVX2)
    if (copy->has_avx2) {
        accumulate_avx2(copy->lanes, stripes, count, SECRET + 8 * index);
        return;
    }
#endif
    for (int64_t i = 0; i < count; i++)
        accumulate(copy->lanes, stripes + i * STRIPE, SECRET + 8 * (index + i));
}

static uint64_t folded_product(uint64_t left, uint64_t right) {
    unsigned __int128 product = (unsigned __int128)left * right;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t xxh3_value(Copy *copy, const char *last_stripe) {
    accumulate(copy->lanes, last_stripe, SECRET + LAST_STRIPE_SECRET);
    uint64_t hash = (uint64_t)copy->position * PRIME64_1;
    for (int i = 0; i < 8; i += 2) {
        const uint8_t *secret = SECRET + MERGE_SECRET + 8 * i;
        hash += folded_product(copy->lanes[i] ^ word_at(secret), copy->lanes[i + 1] ^ word_at(secret + 8));
    }
    hash = (hash ^ (hash >> 37)) * 0x165667919E3779F9u;
    return hash ^ (hash >> 32);
}

/* Words */

static const uint64_t KEY_STEP = 0x9E3779B97F4A7C15u, FACTOR = 0xD6E8FEB86659FD93u;

static inline __attribute__((always_inline)) uint64_t words_sum(const char *words, int64_t count, uint64_t index) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t key = (index + (uint64_t)i + 1) * KEY_STEP, mixed = word_at(words + 8 * i) + key;
        mixed = (mixed ^ (mixed >> 32)) * FACTOR + key;
        mixed = (mixed ^ (mixed >> 32)) * FACTOR;
        sum += mixed ^ (mixed >> 32);
    }
    return sum;
}

/* `rest` is what follows the digested stripes. */
static uint64_t words_value(Copy *copy, const char *rest_bytes) {
    int64_t begin = copy->num_stripes * STRIPE, rest = copy->position - begin;
    char last[STRIPE] = {0};
    memcpy(last, rest_bytes, (size_t)rest);
    return copy->lanes[0] + words_sum(last, (rest + 7) / 8, (uint64_t)begin / 8);
}

/* Copies */

/* Digest whole stripes that follow the digested ones. */
static void add_stripes(Copy *copy, const char *stripes, int64_t count) {
    if (copy->algorithm == WORDS) {
        copy->lanes[0] += words_sum(stripes, count * (STRIPE / 8), (uint64_t)copy->num_stripes * (STRIPE / 8));
        copy->num_stripes += count;
        return;
    }
    if (count > copy->max_stripes - copy->num_stripes)
        count = copy->max_stripes - copy->num_stripes;
    while (count > 0) {
        int64_t index = copy->num_stripes % STRIPES_PER_BLOCK;
        int64_t now = count < STRIPES_PER_BLOCK - index ? count : STRIPES_PER_BLOCK - index;
        accumulate_all(copy, stripes, now, index);
        if (index + now == STRIPES_PER_BLOCK)
            scramble(copy->lanes);
        copy->num_stripes += now;
        stripes += now * STRIPE;
        count -= now;
    }
}

#if defined(WITH_AVX2)
/* `size` is a multiple of a stripe, and `to` of 32. Bytes up to `readable` follow at `from`. */
WITH_AVX2 static void stream(char *to, const char *from, int64_t size, int64_t readable) {
    for (int64_t i = 0; i < size; i += STRIPE) {
        if (i + PREFETCH_BYTES < readable)
            _mm_prefetch(from + i + PREFETCH_BYTES, _MM_HINT_T0);
        __m256i low = _mm256_loadu_si256((const __m256i *)(from + i)), high = _mm256_loadu_si256((const __m256i *)(from + i + 32));
        _mm256_stream_si256((__m256i *)(to + i), low);
        _mm256_stream_si256((__m256i *)(to + i + 32), high);
    }
}
#endif

#if defined(WITH_AVX2)
/* Whether `step_avx2` can copy the next step: the last digested stripe ended a block at this position. */
static int has_step(const Copy *copy, int64_t position) {
    return copy->has_avx2 && copy->algorithm == XXH3 && position == copy->num_stripes * STRIPE &&
           copy->num_stripes % STRIPES_PER_BLOCK == 0 && copy->num_stripes + STRIPES_PER_BLOCK <= copy->max_stripes;
}

/* Copy and digest one step of XXH3, and keep its last stripe. Bytes up to `readable` follow at `from`. */
WITH_AVX2 static void step_avx2(Copy *copy, char *to, const char *from, int64_t readable) {
    __m256i lanes_low = _mm256_loadu_si256((const __m256i *)copy->lanes);
    __m256i lanes_high = _mm256_loadu_si256((const __m256i *)(copy->lanes + 4)), low, high;
    int is_streaming = copy->is_streaming && (uintptr_t)to % 32 == 0;
    for (int64_t i = 0; i < STRIPES_PER_BLOCK; i++, from += STRIPE, to += STRIPE) {
        if (i * STRIPE + PREFETCH_BYTES < readable)
            __builtin_prefetch(from + PREFETCH_BYTES);
        low = _mm256_loadu_si256((const __m256i *)from), high = _mm256_loadu_si256((const __m256i *)(from + 32));
        __asm__ volatile("" : "+x"(low), "+x"(high)); /* from here on these registers are the only source */
        if (is_streaming) {
            _mm256_stream_si256((__m256i *)to, low);
            _mm256_stream_si256((__m256i *)(to + 32), high);
        } else {
            _mm256_storeu_si256((__m256i *)to, low);
            _mm256_storeu_si256((__m256i *)(to + 32), high);
        }
        lanes_low = half_accumulated(lanes_low, low, SECRET + 8 * i);
        lanes_high = half_accumulated(lanes_high, high, SECRET + 8 * i + 32);
    }
    _mm256_storeu_si256((__m256i *)copy->seen, low);
    _mm256_storeu_si256((__m256i *)(copy->seen + 32), high);
    _mm256_storeu_si256((__m256i *)copy->lanes, lanes_low);
    _mm256_storeu_si256((__m256i *)(copy->lanes + 4), lanes_high);
    scramble(copy->lanes);
    copy->num_stripes += STRIPES_PER_BLOCK;
}
#endif

/* Copy the next bytes of the wire from or to a place of the pool where they lie together. */
static void copy_run(Copy *copy, char *pool, int64_t size) {
    char *wire = copy->wire + copy->position, *to = copy->is_gather ? wire : pool;
    const char *from = copy->is_gather ? pool : wire;
    int64_t begun = copy->position % STRIPE, done = 0;
    if (begun) {
        done = size < STRIPE - begun ? size : STRIPE - begun;
        memcpy(to, from, (size_t)done);
        if (copy->algorithm && begun + done == STRIPE)
            add_stripes(copy, wire - begun, 1);
    }
    while (done + STRIPE <= size) {
        int64_t now = STEP_BYTES - (copy->position + done) % STEP_BYTES; /* a step ends with a block of XXH3 */
        if (now > size - done)
            now = (size - done) / STRIPE * STRIPE;
#if defined(WITH_AVX2)
        if (now == STEP_BYTES && has_step(copy, copy->position + done)) {
            step_avx2(copy, to + done, from + done, size - done);
            done += now;
            continue;
        }
        if (copy->is_streaming && (uintptr_t)(to + done) % 32 == 0)
            stream(to + done, from + done, now, size - done);
        else
#endif
            memcpy(to + done, from + done, (size_t)now);
        if (copy->algorithm)
            add_stripes(copy, from + done, now / STRIPE);
        done += now;
    }
    memcpy(to + done, from + done, (size_t)(size - done));
    copy->position += size;
}

/* Copy the next bytes of the wire to a place of the pool where they lie together, and digest them: buffers without gaps only. */
static void scatter_run(Copy *copy, char *pool, int64_t size) {
    for (int64_t now; size > 0; pool += now, size -= now, copy->position += now) {
        const char *from = copy->wire + copy->position;
        int64_t begun = copy->position % STEP_BYTES;
        char *seen = copy->seen + STRIPE + begun;
        now = size < STEP_BYTES - begun ? size : STEP_BYTES - begun;
#if defined(WITH_AVX2)
        if (now == STEP_BYTES && has_step(copy, copy->position)) {
            step_avx2(copy, pool, from, INT64_MAX);
            continue;
        }
#endif
        memcpy(seen, from, (size_t)now);
        __asm__ volatile("" ::: "memory"); /* the pool is copied from `seen`, not from `from` */
#if defined(WITH_AVX2)
        if (copy->is_streaming && (uintptr_t)pool % 32 == 0 && now % STRIPE == 0)
            stream(pool, seen, now, 0);
        else
#endif
            memcpy(pool, seen, (size_t)now);
        if (begun + now == STEP_BYTES) {
            add_stripes(copy, copy->seen + STRIPE, STRIPES_PER_BLOCK);
            memcpy(copy->seen, copy->seen + STEP_BYTES, STRIPE);
        }
    }
}

/* The digest, once everything is copied. */
static uint64_t digest_value(Copy *copy) {
    const char *rest, *end;
    if (copy->is_gather) {
        end = copy->wire + copy->position;
        rest = copy->wire + copy->num_stripes * STRIPE;
    } else {
        int64_t begun = copy->position % STEP_BYTES;
        add_stripes(copy, copy->seen + STRIPE, begun / STRIPE);
        end = copy->seen + STRIPE + begun;
        rest = end - begun % STRIPE;
    }
    return copy->algorithm == XXH3 ? xxh3_value(copy, end - STRIPE) : words_value(copy, rest);
}

/* The next run of a gather lies elsewhere, where no hardware prefetches it. */
static void prefetch_run(const char *pool, int64_t size) {
    for (int64_t i = 0; i < size && i < PREFETCH_BYTES; i += STRIPE)
        __builtin_prefetch(pool + i);
}

static void copy_buffer(Copy *copy, const Buffer *buffer, const int64_t *pages, int64_t page_size) {
    int is_whole = buffer->num_pieces == 1 && buffer->token_stride == buffer->piece_bytes;
    void (*run)(Copy *, char *, int64_t) = copy->algorithm && !copy->is_gather ? scatter_run : copy_run;
    copy->position = buffer->wire;
    for (int64_t token = buffer->begin; token < buffer->end;) {
        int64_t first = token % page_size, count = page_size - first;
        if (count > buffer->end - token)
            count = buffer->end - token;
        char *place = (char *)(intptr_t)buffer->pool + pages[token / page_size] * buffer->page_stride + first * buffer->token_stride;
        token += count;
        if (is_whole) {
            if (copy->is_gather && token < buffer->end)
                prefetch_run((char *)(intptr_t)buffer->pool + pages[token / page_size] * buffer->page_stride, page_size * buffer->piece_bytes);
            run(copy, place, count * buffer->piece_bytes);
            continue;
        }
        for (; count > 0; count--, place += buffer->token_stride)
            for (int64_t piece = 0; piece < buffer->num_pieces; piece++)
                run(copy, place + piece * buffer->piece_stride, buffer->piece_bytes);
    }
}

static PyObject *copy_pages(PyObject *module, PyObject *arguments) {
    Py_buffer buffers, pages;
    long long page_size, num_bytes;
    unsigned long long wire;
    int algorithm, is_gather, is_streaming, has_avx2;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*y*LKLippp", &buffers, &pages, &page_size, &wire, &num_bytes, &algorithm, &is_gather,
                          &is_streaming, &has_avx2))
        return NULL;
    Copy copy = {
        .wire = (char *)(uintptr_t)wire,
        .max_stripes = algorithm == XXH3 ? (num_bytes - 1) / STRIPE : INT64_MAX,
        .algorithm = algorithm,
        .is_gather = is_gather,
        .is_streaming = is_streaming && has_avx2,
        .has_avx2 = has_avx2,
    };
    if (algorithm == XXH3) {
        const uint64_t lanes[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
        memcpy(copy.lanes, lanes, sizeof lanes);
    }
    uint64_t digest = 0;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < buffers.len / (Py_ssize_t)sizeof(Buffer); i++)
        copy_buffer(&copy, (const Buffer *)buffers.buf + i, pages.buf, page_size);
#if defined(WITH_AVX2)
    _mm_sfence(); /* the peer may learn of these bytes by a store of this thread, which must not pass them */
#endif
    if (algorithm)
        digest = digest_value(&copy);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buffers);
    PyBuffer_Release(&pages);
    return PyLong_FromUnsignedLongLong(digest);
}

static PyObject *has_avx2(PyObject *module, PyObject *arguments) {
    (void)module, (void)arguments;
#if defined(WITH_AVX2)
    return PyBool_FromLong(__builtin_cpu_supports("avx2"));
#else
    return PyBool_FromLong(0);
#endif
}

static PyObject *source_hash(PyObject *module, PyObject *arguments) {
    (void)module, (void)arguments;
    return PyUnicode_FromString(SOURCE_HASH);
}

/* Arguments and results are in _host_copy.pyi. */
static PyMethodDef methods[] = {
    {"copy_pages", copy_pages, METH_VARARGS, NULL},
    {"has_avx2", has_avx2, METH_NOARGS, NULL},
    {"source_hash", source_hash, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_host_copy", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__host_copy(void) { return PyModuleDef_Init(&definition); }
