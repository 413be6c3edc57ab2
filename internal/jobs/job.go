// Package jobs has the nouns of durable work and their rules: a job is an action for a
// selection of devices, at a time, at a pace, with an end; a task is a job for one device in
// one round. Rules change a Job in memory; the store applies them to the job's row under its
// lock, in the transaction that also changes the tasks, so that concurrency, rate, stages and
// stop rules hold exactly over any number of nodes. Nothing here does I/O or reads a clock.
package jobs

import (
	"crypto/rand"
	"hash/fnv"
	"strings"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
)

// Limits.
const (
	MaxOpenJobs      = 1000      // jobs of the fleet that have not ended; keys have shares of this and the next two (access.Share)
	MaxOpenTasks     = 1_000_000 // waiting and running tasks of the fleet
	MaxDeviceTasks   = 100       // waiting tasks of one device
	MaxEndedJobs     = 10_000    // of one key without admin; the oldest are deleted
	MaxConfirmations = 10_000    // of one key; the oldest are deleted
	MaxDevices       = 1000      // devices of a job that names them singly
	MaxResult        = 4 << 10   // bytes of a task's result
	MaxDetail        = 1 << 10   // bytes of a task's detail
	PrepareBatch     = 1000      // rows that one transaction of preparing writes
	BeginBatch       = 500       // tasks that one transaction begins or ends
	KeyLifetime      = 7 * 24 * time.Hour
	ConfirmLifetime  = 10 * time.Minute
	Kept             = 30 * 24 * time.Hour // for which ended jobs are kept
	KeptRounds       = 30                  // of a repeating job, the newest; a device that is selected no more keeps those that it had
	DefaultUntil     = 24 * time.Hour
	MaxUntil         = 30 * 24 * time.Hour
	MaxStanding      = 10 * 366 * 24 * time.Hour // of jobs with cron or follow
	MissedAfter      = 5 * time.Minute           // a firing later than this is counted, not made up
	maxMissed        = 10_000                    // firings that are counted as missed at once
	DefaultRetry     = time.Minute
	DefaultShareOf   = 20
	DefaultRate      = "20/s"
	DefaultTogether  = 32 // concurrency
	RateUnlimited    = "unlimited"
	maxKey           = 128
	maxIDLength      = 20
	idClockLength    = 10
	idClockAlphabet  = "0123456789abcdefghjkmnpqrstvwxyz" // in the order of bytes, so that ids sort by time
	maxSpecBytes     = 64 << 10
	maxArgumentBytes = 16 << 10
)

// State is the state of a job.
type State string

// States. Open jobs are those that are neither done nor cancelled.
const (
	Scheduled State = "scheduled" // waits for its time, or for its next round
	Preparing State = "preparing" // the tasks of its selection are being written; none begins
	Running   State = "running"
	Paused    State = "paused" // by a person
	Halted    State = "halted" // by a rule; Reason names it
	Done      State = "done"
	Cancelled State = "cancelled"
)

// Open reports whether a job in this state has not ended.
func (s State) Open() bool { return s != Done && s != Cancelled }

// Reasons of halted jobs. ReasonLimit is also that of a job that is preparing and waits until its tasks fit the share of its key.
const (
	ReasonStop         = "stop"             // the stop rule
	ReasonStage        = "stage_not_passed" // too few tasks of a stage ended ok
	ReasonConfirmation = "confirmation"     // a rule that requires a confirmation came into force later
	ReasonKey          = "key"              // the creator's key has ended
	ReasonRestored     = "restored"         // the database is a restored backup
	ReasonLimit        = "limit"            // its selection has more devices than its key may have open tasks
	ReasonSelect       = "select"           // its selection cannot be read
	ReasonHold         = "hold"             // shown of a job that runs, whose stage has passed and waits for a person
)

// TaskState is the state of a task.
type TaskState string

// States of tasks.
const (
	TaskWaiting TaskState = "waiting"
	TaskRunning TaskState = "running" // committed before the first byte leaves
	TaskEnded   TaskState = "ended"
)

// Outcome is how a task ended; empty while it is open.
type Outcome string

// Outcomes. The first three were sent.
const (
	OK         Outcome = "ok"
	Failed     Outcome = "failed"  // the tool or the device answered with an error
	Unknown    Outcome = "unknown" // bytes may have left, and no answer came; never repeated by itself
	Refused    Outcome = "refused" // by key, policy, arguments or busy: nothing was sent
	Expired    Outcome = "expired" // its deadline passed first
	CancelledT Outcome = "cancelled"
	Already    Outcome = "already"
	Superseded Outcome = "superseded" // by a newer round
	Gone       Outcome = "gone"       // the device was forgotten
)

// Outcomes lists all, in the order of Counts.
var Outcomes = []Outcome{OK, Failed, Unknown, Refused, Expired, CancelledT, Already, Superseded, Gone}

// Codes of tasks beside those of devices.Code.
const (
	CodeToolError = "tool_error" // the tool reported a failure
	CodeSent      = "sent"       // written; devices do not answer it
	CodeQueueFull = "queue_full"
	CodeLimit     = "limit_reached"
	CodeRestored  = "restored"
	CodeNodeLost  = "node_lost" // the node that ran it has ended
)

// Wait is why a task waits.
type Wait string

// Reasons of waiting tasks.
const (
	WaitNone     Wait = ""
	WaitOffline  Wait = "offline"
	WaitAsleep   Wait = "asleep" // WebSocket devices connect when somebody wakes them
	WaitLater    Wait = "later"
	WaitWindow   Wait = "window"
	WaitStage    Wait = "stage"
	WaitPace     Wait = "pace"
	WaitPaused   Wait = "paused"
	WaitHalted   Wait = "halted"
	WaitOrder    Wait = "order" // an older task of the device is due or running
	WaitBusy     Wait = "busy"  // a conversation, or the device's call slots
	WaitRetry    Wait = "retry"
	WaitDatabase Wait = "database"
	WaitNode     Wait = "node"
)

// Waits lists all reasons of waiting tasks.
var Waits = []Wait{WaitOffline, WaitAsleep, WaitLater, WaitWindow, WaitStage, WaitPace, WaitPaused, WaitHalted, WaitOrder, WaitBusy, WaitRetry, WaitDatabase, WaitNode}

// Job is a row of the table jobs. Times have microseconds; the zero time is stored as 0.
type Job struct {
	ID        string
	Owner     string // access.Principal.Owner of the creator
	OwnerName string
	Group     string // of the jobs that roll out one release; empty: none
	Key       string // Idempotency-Key; empty: none
	Hash      string // of the body with that key
	Action    string // the name of the action's kind, which this version may not know: IsKnown
	Spec      api.JobSpec
	Confirmed []string // rules that a person confirmed for the whole job
	Devices   string   // the selection, limited to the creator's devices; see PrepareText

	State   State
	Reason  string
	Before  State // with Paused and Halted: the state to which Resume returns
	Version int64 // raised by every change of the row

	Stage    int       // from 0; len(Spec.Stages): all are open
	StageEnd time.Time // when the soak of a passed stage ends; zero: the stage has not passed
	Opened   int64     // tasks that may begin in all, as far as stages go
	Started  int64     // tasks of the round that have begun, those that wait to be repeated among them
	Held     int64     // those that wait to be repeated: they keep their places in the stage
	PassedOK int64     // successes of the round
	Round    int64
	NextAt   time.Time // of Scheduled: when it is due; zero: at once
	Cursor   string    // of Preparing: the last device that has its row
	Reserved int64     // of Preparing: open tasks that it may still add, which count as its key's; 0: not decided yet
	RoundN   int64     // tasks of the round
	TAT      time.Time // theoretical arrival time of the rate (GCRA)
	Missed   int64
	Harmed   int64 // open tasks that the stop rule counts as failed already
	Provable int64 // tasks that wait for their first attempt, of devices that stay connected, so that all gates can be asked for
	Astray   int64 // devices that were lost after an image that names another server

	Counts    Counts
	CreatedAt time.Time
	BegunAt   time.Time
	Until     time.Time
	EndedAt   time.Time
}

// Counts are the numbers of a job's tasks over all rounds that are kept. They always equal the rows.
type Counts struct {
	Waiting, Running int64
	Ended            [9]int64 // in the order of Outcomes
}

// Of returns the count of an outcome.
func (c *Counts) Of(o Outcome) int64 { return c.Ended[outcomeIndex(o)] }

// Total returns the number of tasks.
func (c *Counts) Total() int64 {
	n := c.Waiting + c.Running
	for _, k := range c.Ended {
		n += k
	}
	return n
}

// Open returns the number of tasks that have not ended.
func (c *Counts) Open() int64 { return c.Waiting + c.Running }

func outcomeIndex(o Outcome) int {
	for i, known := range Outcomes {
		if o == known {
			return i
		}
	}
	panic("jobs: unknown outcome " + string(o))
}

// Task is a row of the table tasks.
type Task struct {
	Job    string
	Round  int64
	Device devices.ID
	Seq    int64 // order of the device's tasks: microseconds of the job's creation or of the round's firing; then by Job
	Spread int64 // order of the job's tasks

	State    TaskState
	DueAt    time.Time // not before; zero: at once
	Attempt  int       // attempts that may have been sent
	Fence    int64     // how often it was begun, whether it was sent or not
	Instance string    // of the node's process that began it last
	Node     string
	Call     string // id of the last call
	Outcome  Outcome
	Code     string
	Detail   string
	Result   string
	Late     bool
	BegunAt  time.Time
	EndedAt  time.Time

	// Of firmware tasks that have begun; see Step.
	Phase   Phase     // PhaseNone unless it runs
	LimitAt time.Time // when the phase ends by itself; of one that waits: no offer before
	Before  string    // ELF SHA-256 of what the device ran, and Target of what it is to run
	Target  string
	Rollout *Rollout
}

// Candidate is a waiting task that a node would like to begin.
type Candidate struct {
	Job    string
	Round  int64
	Device devices.ID
	Seq    int64
	Spread int64
	DueAt  time.Time // not before; zero: at once
	Began  bool      // before, and it is to be repeated
}

// End is how a running task ends, or returns to waiting.
type End struct {
	Job    string
	Round  int64
	Device devices.ID
	// Fence is Task.Fence as Begin returned it. Attempts are not unique: one that was not sent
	// does not count.
	Fence int64

	// NotSent: no byte left; the task waits again, or ends with its cancelled job or older round, and the
	// attempt does not count. The other members, but for Again, Pause and Halt, are then ignored.
	NotSent bool
	Again   time.Time // with NotSent: not before, other tasks of the device may begin meanwhile; zero: at once
	// Pause is when this node looks at the device again. The task stays due, so that none overtakes it.
	Pause time.Duration

	Outcome Outcome
	Code    string
	Detail  string
	Result  string
	Call    string
	Late    bool // an answer after the outcome Unknown was recorded
	// Halt, if not empty, halts the job for this reason, and the task waits again if
	// NotSent is set.
	Halt string
}

// Spread returns the place of a device among a job's tasks, so that the devices of one network
// or batch are not the first ones.
func Spread(job string, device devices.ID) int64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(job))
	_, _ = h.Write([]byte{0})
	_, _ = h.Write([]byte(device))
	x := h.Sum64() // FNV spreads the last bytes into the low bits alone
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	return int64(x >> 1)
}

// NewID returns an id for a job: 20 characters that sort by time.
func NewID(now time.Time) string {
	var id [maxIDLength]byte
	ms := uint64(now.UnixMilli())
	for i := idClockLength - 1; i >= 0; i-- {
		id[i] = idClockAlphabet[ms&31]
		ms >>= 5
	}
	var random [maxIDLength - idClockLength]byte
	_, _ = rand.Read(random[:]) // never fails
	for i, b := range random {
		id[idClockLength+i] = idClockAlphabet[b&31]
	}
	return string(id[:])
}

// IsID reports whether a text has the form of NewID.
func IsID(text string) bool {
	return len(text) == maxIDLength && strings.Trim(text, idClockAlphabet) == ""
}
