/* A CUDA driver's library without a GPU, for the copies that native code makes: streams are threads
   that are late, the device's memory is the host's. Built by tests/experts/driver_library.py. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID_CONTEXT = 201, NOT_FOUND = 500, NOT_SUPPORTED = 801 };

typedef struct Event {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int is_done;
} Event;

typedef struct Operation {
  void* to;
  const void* from;
  size_t bytes;
  uint64_t value;
  Event* event;
  struct Operation* next;
} Operation;

typedef struct Stream {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  pthread_t thread;
  Operation *first, *last;
  int is_closing, is_busy;
} Stream;

/* Settings of a test. */
static int delay_us, copy_code, write_code, has_context = 1;
static char hidden_name[64];
static int num_streams, num_events, num_copies;
static int is_held; /* nothing happens on any stream */
static __thread void* current;

void fake_reset(int delay, int copy, int write, int context, const char* hidden) {
  delay_us = delay, copy_code = copy, write_code = write, has_context = context;
  strncpy(hidden_name, hidden, sizeof hidden_name - 1);
  current = context ? &has_context : NULL;
}
int fake_left(void) { return num_streams + num_events; }
int fake_copies(void) { return num_copies; }
void fake_hold(int holds) { __atomic_store_n(&is_held, holds, __ATOMIC_RELEASE); }

static int get_current(void** found) { return *found = current, OK; }
static int set_current(void* context) { return current = context, OK; }
static int error_string(int code, const char** text) {
  return *text = code == 719 ? "unspecified launch failure" : "made up", OK;
}

static void carry_out(Operation* op) {
  while (__atomic_load_n(&is_held, __ATOMIC_ACQUIRE)) usleep(100);
  if (delay_us) usleep((useconds_t)(rand() % delay_us));
  if (op->event) {
    pthread_mutex_lock(&op->event->lock);
    op->event->is_done = 1;
    pthread_cond_broadcast(&op->event->changed);
    pthread_mutex_unlock(&op->event->lock);
  } else if (op->from) {
    memcpy(op->to, op->from, op->bytes);
  } else {
    __atomic_store_n((uint64_t*)op->to, op->value, __ATOMIC_RELEASE);
  }
}

static void* run(void* argument) {
  Stream* stream = argument;
  pthread_mutex_lock(&stream->lock);
  for (;;) {
    while (!stream->first && !stream->is_closing) pthread_cond_wait(&stream->changed, &stream->lock);
    Operation* op = stream->first;
    if (!op) break;
    stream->first = op->next;
    stream->is_busy = 1;
    pthread_mutex_unlock(&stream->lock);
    carry_out(op);
    free(op);
    pthread_mutex_lock(&stream->lock);
    stream->is_busy = 0;
    pthread_cond_broadcast(&stream->changed);
  }
  pthread_mutex_unlock(&stream->lock);
  return NULL;
}

static int queue(Stream* stream, Operation given) {
  if (!current) return INVALID_CONTEXT;
  Operation* op = malloc(sizeof *op);
  *op = given;
  op->next = NULL;
  pthread_mutex_lock(&stream->lock);
  if (stream->first) stream->last->next = op; else stream->first = op;
  stream->last = op;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
  return OK;
}

static int stream_create(void** found, unsigned flags, int priority) {
  if (!current) return INVALID_CONTEXT;
  if (flags != 1 || priority != 0) return 1;
  Stream* stream = calloc(1, sizeof *stream);
  pthread_mutex_init(&stream->lock, NULL);
  pthread_cond_init(&stream->changed, NULL);
  pthread_create(&stream->thread, NULL, run, stream);
  return ++num_streams, *found = stream, OK;
}

static int stream_synchronize(Stream* stream) {
  pthread_mutex_lock(&stream->lock);
  while (stream->first || stream->is_busy) pthread_cond_wait(&stream->changed, &stream->lock);
  pthread_mutex_unlock(&stream->lock);
  return OK;
}

static int stream_destroy(Stream* stream) {
  pthread_mutex_lock(&stream->lock);
  stream->is_closing = 1;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
  pthread_join(stream->thread, NULL);
  free(stream);
  return --num_streams, OK;
}

static int event_create(void** found, unsigned flags) {
  if (!current) return INVALID_CONTEXT;
  if (flags != 3) return 1;
  Event* event = calloc(1, sizeof *event);
  pthread_mutex_init(&event->lock, NULL);
  pthread_cond_init(&event->changed, NULL);
  return ++num_events, *found = event, OK;
}

static int event_destroy(void* event) { return free(event), --num_events, OK; }

static int event_record(Event* event, Stream* stream) {
  pthread_mutex_lock(&event->lock);
  event->is_done = 0;
  pthread_mutex_unlock(&event->lock);
  return queue(stream, (Operation){.event = event});
}

static int event_synchronize(Event* event) {
  pthread_mutex_lock(&event->lock);
  while (!event->is_done) pthread_cond_wait(&event->changed, &event->lock);
  pthread_mutex_unlock(&event->lock);
  return OK;
}

static int copy_to_device(uint64_t to, const void* from, size_t bytes, Stream* stream) {
  if (copy_code) return copy_code;
  ++num_copies;
  return queue(stream, (Operation){.to = (void*)to, .from = from, .bytes = bytes});
}

static int copy_to_host(void* to, uint64_t from, size_t bytes, Stream* stream) {
  return queue(stream, (Operation){.to = to, .from = (const void*)from, .bytes = bytes});
}

static int write_value(Stream* stream, uint64_t to, uint64_t value, unsigned flags) {
  if (write_code || flags) return write_code ? write_code : 1;
  return queue(stream, (Operation){.to = (void*)to, .value = value});
}

static const struct {
  const char* name;
  void* function;
} functions[] = {
    {"cuCtxGetCurrent", get_current},
    {"cuCtxSetCurrent", set_current},
    {"cuGetErrorString", error_string},
    {"cuStreamCreateWithPriority", stream_create},
    {"cuStreamDestroy", stream_destroy},
    {"cuStreamSynchronize", stream_synchronize},
    {"cuEventCreate", event_create},
    {"cuEventDestroy", event_destroy},
    {"cuEventRecord", event_record},
    {"cuEventSynchronize", event_synchronize},
    {"cuMemcpyHtoDAsync", copy_to_device},
    {"cuMemcpyDtoHAsync", copy_to_host},
    {"cuStreamWriteValue64", write_value},
};

int cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t flags, void* status) {
  (void)flags, (void)status;
  *found = NULL;
  if (version < 12000 || !strcmp(name, hidden_name)) return NOT_FOUND;
  for (size_t i = 0; i < sizeof functions / sizeof *functions; ++i)
    if (!strcmp(name, functions[i].name)) return *found = functions[i].function, OK;
  return NOT_FOUND;
}
