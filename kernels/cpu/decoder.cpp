// The dense part of a decode step, for a few rows: a decoder layer up to its attention, the rest of it, and the head.
#include <algorithm>
#include <cstring>
#include <vector>

#include "interface.hpp"
#include "phases.hpp"

using namespace bitkv;

namespace {

constexpr int64_t TASK_BYTES = 1 << 16;  // weights of one task: small enough to share out, large against taking it

// The outputs of some matrices, one after the other, cut into tasks of about TASK_BYTES.
struct Outputs {
    std::vector<const Matrix*> matrices;
    std::vector<float*> y;  // [rows, out] of each

    static int64_t step(const Matrix& m) { return std::max<int64_t>(1, TASK_BYTES / (m.in * (m.bfloat16 ? 2 : 4))); }
    static int64_t tasks(const Matrix& m) { return (m.out + step(m) - 1) / step(m); }

    int64_t count() const {
        int64_t all = 0;
        for (const Matrix* m : matrices) all += tasks(*m);
        return all;
    }

    void run(int64_t task, const float* x, int64_t rows) const {
        size_t which = 0;
        for (; task >= tasks(*matrices[which]); ++which) task -= tasks(*matrices[which]);
        const Matrix& m = *matrices[which];
        kernels().linear(m, task * step(m), std::min(m.out, (task + 1) * step(m)), x, rows, y[which]);
    }
};

// The weights of a decoder layer; query_norm and key_norm [D] are null where the architecture has none.
struct Block {
    int64_t heads, kv_heads, dim, rotary_dim;
    float eps;
    const float *attention_norm, *mlp_norm, *query_norm, *key_norm;
    Matrix q, k, v, o, gate, up, down;
};

// Some heads [heads, D] of one position.
void place(const Block& block, int64_t heads, const float* norm, const float* cosine, const float* sine, float* x) {
    for (int64_t i = 0; i < heads; ++i, x += block.dim) {
        if (norm) kernels().rms_norm(block.dim, block.eps, x, norm, x);
        kernels().rotary(block.rotary_dim, cosine, sine, x);
    }
}

template <class Work>
void share_rows(int64_t rows, int64_t threads, const Work& work) {
    constexpr int64_t TASK = 32;
    Pool::instance().run((rows + TASK - 1) / TASK, threads, [&](int64_t task) {
        for (int64_t r = task * TASK; r < std::min(rows, (task + 1) * TASK); ++r) work(r);
    });
}

// Calls work(other, row) with row r of `other` and of x [rows, width], which it changes; both may be the same. Rows in bfloat16 travel as
// float32 copies.
template <class Work>
void with_row(void* x, bool bfloat16, int64_t r, int64_t width, const void* other, const Work& work) {
    if (!bfloat16) return work((const float*)other + r * width, (float*)x + r * width);
    thread_local std::vector<float> room;
    room.resize(2 * width);
    uint16_t* row = (uint16_t*)x + r * width;
    const bool same = x == other;
    kernels().widen(width, row, room.data());
    if (!same) kernels().widen(width, (const uint16_t*)other + r * width, &room[width]);
    work(same ? room.data() : &room[width], room.data());
    kernels().narrow(width, room.data(), row);
}

}  // namespace

extern "C" {

// The small operations of a prompt's layer, between torch's matrix products; all of them row by row, over numbers in float32, or in bfloat16,
// which are widened and rounded once.

// y[r] = norm of x[r], [rows, width]; weight fp32
void bitkv_norm(const float* weight, float eps, const void* x, int64_t bfloat16, int64_t rows, int64_t width, void* y, int64_t threads) {
    share_rows(rows, threads, [&](int64_t r) {
        with_row(y, bfloat16, r, width, x, [&](const float* from, float* to) { kernels().rms_norm(width, eps, from, weight, to); });
    });
}

// Norms, where the architecture has them, and rotary positions of q [rows, H, D] and k [rows, HK, D] in place.
void bitkv_place(const Block* block, const float* cosine, const float* sine, void* q, void* k, int64_t bfloat16, int64_t rows, int64_t threads) {
    share_rows(rows, threads, [&](int64_t r) {
        const auto turn = [&](void* x, int64_t heads, const float* norm) {
            with_row(x, bfloat16, r, heads * block->dim, x, [&](const float*, float* row) {
                place(*block, heads, norm, cosine + r * block->rotary_dim, sine + r * block->rotary_dim, row);
            });
        };
        turn(q, block->heads, block->query_norm);
        turn(k, block->kv_heads, block->key_norm);
    });
}

// gate = silu(gate) * up, [rows, width]
void bitkv_gate(void* gate, const void* up, int64_t bfloat16, int64_t rows, int64_t width, int64_t threads) {
    share_rows(rows, threads, [&](int64_t r) {
        with_row(gate, bfloat16, r, width, up, [&](const float* factors, float* row) { kernels().gated(width, row, factors); });
    });
}

// hidden fp32 [rows, E], cosine and sine [rows, rotary_dim] -> q [rows, H, D], k and v [rows, HK, D]
void bitkv_project(const Block* block, const float* hidden, int64_t rows, const float* cosine, const float* sine, float* q, float* k,
                   float* v, int64_t threads) {
    const Kernels& run = kernels();
    const int64_t width = block->q.in;
    std::vector<float> normed(rows * width);
    for (int64_t r = 0; r < rows; ++r) run.rms_norm(width, block->eps, hidden + r * width, block->attention_norm, &normed[r * width]);
    const Outputs outputs = {{&block->q, &block->k, &block->v}, {q, k, v}};
    Pool::instance().run(outputs.count(), threads, [&](int64_t task) { outputs.run(task, normed.data(), rows); });
    bitkv_place(block, cosine, sine, q, k, false, rows, 1);
}

// attended fp32 [rows, H D], the attention's output; hidden fp32 [rows, E] becomes the layer's output in place.
void bitkv_feed_forward(const Block* block, const float* attended, float* hidden, int64_t rows, int64_t threads) {
    const Kernels& run = kernels();
    const int64_t width = block->o.out, inner = block->gate.out;
    std::vector<float> change(rows * width), normed(rows * width), gate(rows * inner), up(rows * inner);
    const Outputs projected = {{&block->o}, {change.data()}}, widened = {{&block->gate, &block->up}, {gate.data(), up.data()}},
                  narrowed = {{&block->down}, {change.data()}};
    const auto add = [&] {
        for (int64_t i = 0; i < rows * width; ++i) hidden[i] += change[i];
    };
    run_phases(
        {{projected.count(), [&](int64_t task) { projected.run(task, attended, rows); },
          [&] {
              add();
              for (int64_t r = 0; r < rows; ++r) run.rms_norm(width, block->eps, hidden + r * width, block->mlp_norm, &normed[r * width]);
          }},
         {widened.count(), [&](int64_t task) { widened.run(task, normed.data(), rows); },
          [&] { run.gated(rows * inner, gate.data(), up.data()); }},
         {narrowed.count(), [&](int64_t task) { narrowed.run(task, gate.data(), rows); }, add}},
        threads);
}

// hidden fp32 [rows, E] -> logits fp32 [rows, out] of the last norm and the head
void bitkv_head(const Matrix* head, const float* norm, float eps, const float* hidden, int64_t rows, float* logits, int64_t threads) {
    std::vector<float> normed(rows * head->in);
    for (int64_t r = 0; r < rows; ++r) kernels().rms_norm(head->in, eps, hidden + r * head->in, norm, &normed[r * head->in]);
    const Outputs outputs = {{head}, {logits}};
    Pool::instance().run(outputs.count(), threads, [&](int64_t task) { outputs.run(task, normed.data(), rows); });
}

}  // extern "C"
