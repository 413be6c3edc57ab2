package jobs

import (
	"context"
	"errors"
	"time"

	"fleetd/internal/devices"
)

// Errors of Store.
var (
	// ErrConflict: the Idempotency-Key was used with another body.
	ErrConflict = &devices.Error{Code: devices.CodeConflict, Detail: "this Idempotency-Key was used with another body; use a new key, or repeat the body"}
	// ErrQueueFull: the device has as many waiting tasks as it may, or as many of the key as its share is.
	ErrQueueFull = &devices.Error{Code: devices.CodeQueueFull, Detail: "the queue of the device is full: its 100 places, or those that one key may take of them, are taken; wait for tasks to end, or cancel some"}
	// ErrOpenJobs and ErrOpenTasks: the fleet has as many as it may, or the key as many as its share is.
	ErrOpenJobs  = devices.LimitReached("open jobs", MaxOpenJobs)
	ErrOpenTasks = devices.LimitReached("open tasks of jobs", MaxOpenTasks)
	// ErrStale: the row is not in the state that the operation needs.
	ErrStale = errors.New("the job has changed meanwhile")
)

// Store keeps jobs and tasks. Every method is one or more transactions on the database; errors
// wrap devices.ErrDatabase, and devices.ErrUncertain if it is not known whether the transaction
// was committed; devices.ErrNotFound: the job does not exist. Transactions lock rows of jobs by
// id, then rows of tasks by (job, round, device). now is the database's clock, see Now. It is
// safe for concurrent use.
type Store interface {
	// Now returns the database's clock: on Postgres as last measured, at most some seconds
	// ago; on SQLite the node's. It does no I/O.
	Now() time.Time

	// Create commits a job, and with tasks its rows (at most MaxDevices), so that a job of
	// a few devices needs no preparing: it is given as Preparing (Job.Fire), and
	// Create counts its rows and ends the preparing, as AddTasks does with last. If Owner has used Key in the last KeyLifetime, it
	// returns that job and again, or ErrConflict if the hashes differ. ErrOpenJobs or ErrOpenTasks if they do not fit the
	// share of Owner; ErrQueueFull if the one task of a job does not fit the queue of its device.
	Create(ctx context.Context, j Job, tasks []Task) (stored Job, again bool, err error)
	// CreateGroup is Create, without tasks, of jobs that have one group, all or none. Only the first has a Key; again returns those of its
	// group. Waiting firmware tasks of older jobs end as superseded when the devices get tasks of these.
	CreateGroup(ctx context.Context, list []Job) (stored []Job, again bool, err error)
	// Repeated returns the job that owner has created with this key in the last KeyLifetime, or
	// devices.ErrNotFound; ErrConflict if the hashes differ.
	Repeated(ctx context.Context, owner, key, hash string) (Job, error)
	// Job returns a job.
	Job(ctx context.Context, id string) (Job, error)
	// Jobs returns jobs, newest first.
	Jobs(ctx context.Context, f Filter) (list []Job, next string, err error)
	// Open returns all open jobs, in order of id. It is one query of at most MaxOpenJobs rows.
	Open(ctx context.Context) ([]Job, error)
	// Edit locks a job's row, applies f, and writes the result with the next Version. An
	// error of f is returned, and nothing is written.
	Edit(ctx context.Context, id string, f func(j *Job) error) (Job, error)
	// Take is Edit of a job that becomes that of another owner, without its Idempotency-Key. ErrOpenJobs or
	// ErrOpenTasks if it does not fit the share of that owner.
	Take(ctx context.Context, id, owner, name string, f func(j *Job) error) (Job, error)
	// Room returns how many open tasks may be added now for this owner.
	Room(ctx context.Context, owner string) (int64, error)
	// Reserve applies Job.Reserve for a selection of n devices.
	Reserve(ctx context.Context, id string, n int64) (Job, error)

	// AddTasks writes rows of the round of a job that is Preparing with this cursor, and sets
	// the cursor; with last it also ends the preparing (Job.Prepared). Rows that exist are
	// left alone. Devices without a place in their queue get a row that ended as Refused
	// with CodeQueueFull; rows that fit neither what is reserved nor the share of the owner end with CodeLimit, or with follow are left out with ErrOpenTasks, while the others
	// are written. A job with follow that was prepared takes rows, too, with both
	// cursors empty; without new ones nothing is written. ErrStale if the job is not in that state.
	AddTasks(ctx context.Context, id, cursor, next string, tasks []Task, last bool) (Job, error)
	// EndWaiting ends up to limit waiting tasks of a job with this outcome: of all rounds
	// below round, or with round < 0 of all; device, if not empty, is the only one. It
	// returns the job afterwards.
	EndWaiting(ctx context.Context, id string, round int64, device devices.ID, outcome Outcome, code string, limit int) (ended []Task, j Job, err error)
	// Retry returns up to limit ended tasks of a round with one of these outcomes to waiting, in order of device from the
	// one behind after on, and applies Job.Reopen if there are any. next is the last of these devices, or empty if no
	// more follow: the round has been replaced, or all its tasks were seen. ErrOpenJobs, ErrOpenTasks or ErrQueueFull,
	// and nothing is changed, if they do not fit the shares of the owner.
	Retry(ctx context.Context, id string, round int64, outcomes []Outcome, after devices.ID, limit int) (n int, next devices.ID, j Job, err error)

	// Waiting returns waiting tasks of a job whose Spread is above after, in order of
	// Spread, whatever their DueAt.
	Waiting(ctx context.Context, id string, after int64, limit int) ([]Candidate, error)
	// WaitingOf returns waiting tasks of these devices, in order of device and of its queue,
	// at most perDevice of each device: the oldest, and rather those whose job may begin
	// tasks now than others, none of a job in without; and which of the devices had a task that runs at that moment.
	WaitingOf(ctx context.Context, ids []devices.ID, perDevice int, without []string) (list []Candidate, running []devices.ID, err error)
	// Begin begins those of the candidates that may begin now, as one transaction: their jobs
	// have Room, no task of the device is running, and none of the device that is older
	// and due could begin before it. instance must have a lease, where there are leases.
	// It returns the tasks that are now running; the caller may send at once. Candidates
	// that do not begin are left out, with no error. With ErrUncertain it returns those that
	// may be running: nothing may be sent, and the caller ends them as NotSent later.
	Begin(ctx context.Context, node, instance string, list []Candidate) (begun []Task, changed []Change, err error)
	// End records how tasks that this instance runs ended, with the jobs' counters, and
	// applies Job.Record. Ends of tasks that another attempt, instance or outcome owns
	// already are ignored, except answers (OK, Failed) that come after Unknown was recorded
	// for the same Fence: they replace it, and the task is Late. A task that failed, or is
	// Unknown and repeatable, waits again if Job.RetryAt wants it; ended has it as waiting.
	End(ctx context.Context, instance string, list []End) (ended []Task, changed []Change, err error)
	// LoseRunning ends, as Unknown with CodeNodeLost, running tasks of processes without a
	// lease; with self, on a database without leases, of every instance but that.
	LoseRunning(ctx context.Context, self string, limit int) (ended []Task, changed []Change, err error)

	// Step locks a job and the task that a device has in its current round, applies f and writes both with the next Version. f gets whether an
	// older task of the device is due or running, so that a waiting task may not begin. An error of f is returned, and nothing is written.
	// devices.ErrNotFound: there is no such task.
	Step(ctx context.Context, id string, device devices.ID, f func(s *Step, ahead bool) error) (Task, error)
	// Outlook says at a fraction of its cost whether Rolling has something for a check at which a device shows an image.
	Outlook(ctx context.Context, device devices.ID, elf string) (Outlook, error)
	// Rolling returns the firmware task of a device that runs, else those that wait, in their order.
	Rolling(ctx context.Context, device devices.ID) ([]Queued, error)
	// Overdue returns running firmware tasks whose phase has passed its limit.
	Overdue(ctx context.Context, limit int) ([]Task, error)
	// Rolled returns the firmware task of a device that began and ended last, of those with this image; empty: with any.
	Rolled(ctx context.Context, device devices.ID, elf string) (Task, error)
	// Supersede ends the waiting firmware tasks of devices that are of jobs older than this one.
	Supersede(ctx context.Context, id string, ids []devices.ID) error
	// Changed returns how many devices a firmware job has given its image, by what they ran before; and those of the given devices.
	Changed(ctx context.Context, id string) (byBefore map[string]int64, err error)
	ChangedOf(ctx context.Context, id string, ids []devices.ID) (before map[devices.ID]string, err error)
	// Marks returns what keeps these devices from firmware or a restart; Unbar lifts a bar.
	Marks(ctx context.Context, ids []devices.ID) (map[devices.ID]Mark, error)
	Unbar(ctx context.Context, id devices.ID) error
	// ConfirmImage notes that a device without a running firmware task has checked in.
	ConfirmImage(ctx context.Context, id devices.ID) error

	// Tasks returns tasks of a job in order of device and round, for lists and reports.
	Tasks(ctx context.Context, f TaskFilter) (list []Task, next string, err error)
	// Queue returns the open tasks of a device in their order, with their jobs.
	Queue(ctx context.Context, id devices.ID) ([]Queued, error)
	// Forget ends all open tasks of devices as Gone.
	Forget(ctx context.Context, ids ...devices.ID) error
	// Erase deletes what a device answered: results and details of its ended tasks.
	Erase(ctx context.Context, id devices.ID) error

	// Confirm stores a confirmation request of owner for the body with this hash, under
	// the token's digest, until now + ConfirmLifetime; TakeConfirm removes it and returns
	// the rules, or devices.ErrNotFound if it does not exist, has expired or belongs to
	// another owner or body.
	Confirm(ctx context.Context, digest, owner, hash string, rules []string) error
	TakeConfirm(ctx context.Context, digest, owner, hash string) (rules []string, err error)
	// DropConfirm removes a confirmation request of owner, if it exists.
	DropConfirm(ctx context.Context, digest, owner string) error

	// CheckHistory compares the database with what this process knows: if fewer tasks have begun in it, it was restored, and
	// HaltRestored follows.
	CheckHistory(ctx context.Context) error
	// HaltRestored halts all open jobs as restored, and ends running tasks as Unknown; planned: but those that are Idle.
	HaltRestored(ctx context.Context, planned bool) error
	// TakeTurn reports whether this process may do the fleet's periodic work for the next
	// few seconds; at most one may.
	TakeTurn(ctx context.Context, instance string, lasts time.Duration) (bool, error)
	// Prune deletes jobs that ended before a time, and the oldest ended ones of keys without admin that have more than MaxEndedJobs, with their
	// tasks, at most limit rows, and expired confirmations.
	Prune(ctx context.Context, before time.Time, limit int) (int, error)
}

// Filter selects jobs of a list.
type Filter struct {
	State  State
	Open   bool   // only jobs that have not ended
	Action string // call, message or restart
	Device devices.ID
	Owner  string // only jobs of this owner and of its children; empty: all
	Group  string
	After  string // the next of the page before
	Limit  int
}

// TaskFilter selects tasks of a job.
type TaskFilter struct {
	Job     string
	Outcome Outcome
	Open    bool // only those that have not ended
	Running bool // only those that run
	After   string
	Limit   int
}

// Mark is what keeps a device from firmware, or from a restart.
type Mark struct {
	BarredUntil time.Time
	Reason      string    // of the bar
	Unconfirmed time.Time // since when a new image may not be confirmed; zero: it is
}

// Queued is an open task with its job.
type Queued struct {
	Task Task
	Job  Job
}

// Outlook is what a check of a device can change of its firmware tasks.
type Outlook struct {
	Open        int64 // tasks
	Moves       bool  // one of them runs, or waits while the device shows its image
	Ready       bool  // the job of one lets tasks begin
	Unconfirmed bool  // the device has a new image that it may not have confirmed; see Mark
}

// Change is a job whose row a transaction has written, as it is afterwards: its state may be
// the same as before.
type Change struct {
	Job       Job
	From      State // before; empty: it is new
	FromStage int
	FromOpen  int64 // tasks
	First     bool  // its first task has begun
	Stepped   *Task // the firmware task that a step has moved on; nil: none, or not visibly
}
