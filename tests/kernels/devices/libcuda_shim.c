// The calls of libcuda.so that tandem.kernels.cuda makes: host functions run on a thread of their own,
// in the order of their stream, as the driver runs them. A stream is any small number.
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef void (*HostFunction)(void*);

enum { kStreams = 8, kInvalidValue = 1, kNoDevice = 100, kInvalidHandle = 400 };

typedef struct Task {
  HostFunction function;
  void* argument;
  struct Task* next;
} Task;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct {
  Task* first;
  Task** last;
  int num_waiting;
  int has_thread;
} streams[kStreams];
static int init_status = 0;
static int is_initialised = 0;

static void* run(void* argument) {
  const intptr_t stream = (intptr_t)argument;
  pthread_mutex_lock(&mutex);
  for (;;) {
    while (streams[stream].first == NULL) pthread_cond_wait(&changed, &mutex);
    Task* task = streams[stream].first;
    streams[stream].first = task->next;
    if (task->next == NULL) streams[stream].last = &streams[stream].first;
    pthread_mutex_unlock(&mutex);
    task->function(task->argument);
    free(task);
    pthread_mutex_lock(&mutex);
    --streams[stream].num_waiting;
    pthread_cond_broadcast(&changed);
  }
  return NULL;
}

int cuInit(unsigned flags) {
  if (flags != 0) return kInvalidValue;
  is_initialised = init_status == 0;
  return init_status;
}

int cuGetErrorName(int error, const char** name) {
  *name = error == kNoDevice ? "CUDA_ERROR_NO_DEVICE"
          : error == kInvalidHandle ? "CUDA_ERROR_INVALID_HANDLE" : NULL;
  return *name == NULL ? kInvalidValue : 0;
}

int cuLaunchHostFunc(void* handle, HostFunction function, void* argument) {
  const intptr_t stream = (intptr_t)handle;
  if (!is_initialised || stream < 1 || stream >= kStreams) return kInvalidHandle;
  Task* task = malloc(sizeof *task);
  *task = (Task){function, argument, NULL};
  pthread_mutex_lock(&mutex);
  if (!streams[stream].has_thread) {
    pthread_t thread;
    streams[stream].has_thread = 1;
    streams[stream].last = &streams[stream].first;
    pthread_create(&thread, NULL, run, (void*)stream);
    pthread_detach(thread);
  }
  *streams[stream].last = task;
  streams[stream].last = &task->next;
  ++streams[stream].num_waiting;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
  return 0;
}

// For the test: what cuInit answers, and the wait for a stream.
void shim_set_init(int status) { init_status = status; }
void shim_wait(intptr_t stream) {
  pthread_mutex_lock(&mutex);
  while (streams[stream].num_waiting > 0) pthread_cond_wait(&changed, &mutex);
  pthread_mutex_unlock(&mutex);
}
