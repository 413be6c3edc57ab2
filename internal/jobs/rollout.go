package jobs

import (
	"slices"
	"strings"
	"time"

	"fleetd/internal/timescale"
)

// Phase is what a running firmware task waits for. A call's task belongs to the process that runs it; a firmware task belongs to its
// row, and whoever sees the next check, download or connection moves it on.
type Phase string

// Phases.
const (
	PhaseNone    Phase = ""
	PhaseCalled  Phase = "called"  // the device was told to restart
	PhaseOffered Phase = "offered" // a check was answered with the image
	PhaseLoading Phase = "loading"
	PhaseBooting Phase = "booting" // the last byte was sent
	PhaseProving Phase = "proving" // a check showed the image
)

// Gates, in their order.
const (
	GateBoot    = "boot"
	GateConnect = "connect"
	GateTools   = "tools"
	GateStatus  = "status"
	GateStay    = "stay"
)

// Gates lists all gates in their order.
var Gates = []string{GateBoot, GateConnect, GateTools, GateStatus, GateStay}

// Bounds of a firmware task.
const (
	MaxOffers   = 5
	MaxRestarts = 3
	MaxFlashes  = 2 // without the image; then the device is barred
	maxUnheard  = 2 // restarts without a check
	maxBroken   = 3 // downloads that broke
	maxChecks   = 3 // checks while the image is proved, the third of which fails it
	maxAstray   = 2 // devices lost after an image that names another server
)

// Times of a firmware task.
var (
	CalledTime  = timescale.Of(3 * time.Minute)
	offeredTime = timescale.Of(90 * time.Second)
	// NoteEvery is how often the bytes of a download are recorded. A node ends one that takes nothing for 30 s; the row of one whose node
	// is gone waits for a note and as long again.
	NoteEvery    = timescale.Of(15 * time.Second)
	loadingTime  = timescale.Of(30*time.Second) + NoteEvery
	bootingTime  = timescale.Of(15 * time.Minute)
	connectTime  = timescale.Of(3 * time.Minute)
	toolsTime    = timescale.Of(2 * time.Minute) // with the status
	restartPause = timescale.Of(10 * time.Minute)
	firstPause   = timescale.Of(10 * time.Minute) // after a broken download, or a flash without the image
	secondPause  = timescale.Of(time.Hour)
	sameOffer    = timescale.Of(3 * time.Minute) // a repeated check gets the same offer
	BarTime      = timescale.Of(24 * time.Hour)
)

// Codes of firmware tasks.
const (
	CodeRolledBack   = "rolled_back"    // a check after the flash showed the former image
	CodeImageRefused = "image_refused"  // the device connected without a check after the flash
	CodeBootLoop     = "boot_loop"      // it restarted again and again with the image
	CodeLost         = "lost"           // it did not come back after the flash
	CodeNoCheck      = "no_check"       // it was told to restart, and made no check
	CodeDownload     = "download"       // its downloads broke
	CodeNotFetched   = "not_fetched"    // it fetched none of its offers
	CodeOtherImage   = "other_image"    // it runs an image that is neither the former nor the new one
	CodeUnconfirmed  = "unconfirmed"    // of a restart: the device has not confirmed its image
	CodeContested    = "contested"      // another device checks in with its id
	CodeBoardChanged = "board_changed"  // with the image, the device says that it is another board
	CodeGate         = "gate_"          // before the name of the gate that the device did not pass
	ReasonBoard      = CodeBoardChanged // of a halted job
	ReasonAstray     = "astray"         // of a halted job: devices were lost after an image that names another server
)

// NotByItself is when a task is due that waits for the device's next start.
var NotByItself = time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC)

// Rollout is how far a firmware task has come. Task has what the database looks for.
type Rollout struct {
	Provable bool `json:"provable,omitempty"` // the device stays connected, so that all gates can be asked for

	Board    string `json:"board"`    // before the task began
	Hardware string `json:"hardware"` // what an upgrade does not change; see DeviceCheck
	Display  string `json:"display"`
	Catalog  string `json:"catalog,omitempty"` // hash of the tools before; empty: not known
	// CheckedAt is when the device had checked in last when it was told to restart.
	CheckedAt time.Time `json:"checked_at,omitzero"`
	Version   string    `json:"version,omitempty"` // of the image, as the last offer had it
	Foreign   bool      `json:"foreign,omitempty"` // the image names another server
	Single    bool      `json:"single,omitempty"`  // at most one offer: firmware before v1.8.0 restarts after a failed one

	Offers   int `json:"offers,omitempty"`
	Flashes  int `json:"flashes,omitempty"`
	Excused  int `json:"excused,omitempty"` // flashes that do not count, since no node answered the first check; at most one
	Restarts int `json:"restarts,omitempty"`
	Unheard  int `json:"unheard,omitempty"`
	Broken   int `json:"broken,omitempty"`

	Token     string    `json:"token,omitempty"`     // of the last offer
	From      string    `json:"from,omitempty"`      // address of the check with it
	OfferedAt time.Time `json:"offered_at,omitzero"` // zero: it was fetched
	Flashed   bool      `json:"flashed,omitempty"`   // Flashes counts the flash of that offer
	Bytes     int64     `json:"bytes,omitempty"`
	Size      int64     `json:"size,omitempty"`

	Gate      string `json:"gate,omitempty"` // to pass next
	Proven    string `json:"proven,omitempty"`
	Checks    int    `json:"checks,omitempty"`     // with the image
	WebSocket bool   `json:"web_socket,omitempty"` // the device connects only when somebody wakes it

	Replaces string `json:"replaces,omitempty"` // of a rollback: the image that it takes away; empty: whatever the device runs
	Harmed   bool   `json:"harmed,omitempty"`   // the stop rule counts the device already
}

// Again is the rollout of a task that a person repeats: what was counted does not count. r may be nil.
func (r *Rollout) Again() *Rollout {
	if r == nil {
		return nil
	}
	return &Rollout{Provable: r.Provable, Replaces: r.Replaces}
}

// DeviceCheck is what a device said at an OTA check.
type DeviceCheck struct {
	ELF      string
	Board    string
	Hardware string // chip, flash and partition table
	Display  string
	From     string // address of the check
	// WebSocket is whether the answer sends the device there.
	WebSocket bool
}

// Step is one change of a firmware task, under the lock of its job. It is made by one caller and not kept.
type Step struct {
	Job  *Job
	Task *Task
	Now  time.Time

	// Answering is given to See: since when some node answers checks, as far as is known.
	Answering time.Time
	// Bar is set to why the device gets no more firmware for BarTime.
	Bar string
	// Heard is given to Expire: the device has checked in since it was told to restart, and no node could answer it with the image.
	Heard bool
	// Flashed is set when the device got the last byte, so that it may be unconfirmed, and Checked when it has checked in since.
	Flashed, Checked bool
}

// Rollout returns that of the task, which it makes at first.
func (s *Step) Rollout() *Rollout {
	if s.Task.Rollout == nil {
		s.Task.Rollout = &Rollout{}
	}
	return s.Task.Rollout
}

// Runs reports whether the task runs.
func (s *Step) Runs() bool { return s.Task.State == TaskRunning }

// MayBegin reports whether a waiting task may begin, or be offered again, as far as its job and its own pauses go. check is whether the
// device is at a check: then it need not be told to restart.
func (s *Step) MayBegin(check bool) bool {
	t := s.Task
	if t.State != TaskWaiting || !check && t.DueAt.After(s.Now) {
		return false
	}
	if check && s.CanRepeat() {
		return true
	}
	if t.LimitAt.After(s.Now) || t.Rollout != nil && t.Rollout.Offers >= s.maxOffers() {
		return false
	}
	return !s.Job.IsFullFor(t) && s.hasRoom()
}

func (s *Step) maxOffers() int {
	if r := s.Task.Rollout; r != nil && r.Single {
		return 1
	}
	return MaxOffers
}

// begin makes a waiting task running.
func (s *Step) begin() {
	if s.Runs() {
		return
	}
	s.Job.Start(s.Now, s.Task)
	t := s.Task
	t.State, t.BegunAt = TaskRunning, s.Now
	t.Attempt++
	t.Fence++
}

// enter enters a phase of the running task.
func (s *Step) enter(p Phase, lasts time.Duration) {
	s.Task.Phase, s.Task.LimitAt = p, s.Now.Add(lasts)
}

// Call begins a waiting task with a restart, which is counted before it is sent.
func (s *Step) Call() {
	s.begin()
	r := s.Rollout()
	r.Restarts++
	s.Task.DueAt = s.Now.Add(restartPause)
	s.enter(PhaseCalled, CalledTime)
}

// NotCalled undoes Call, for a restart that was not sent; again is when to try again.
func (s *Step) NotCalled(again time.Time) {
	if s.Task.Phase != PhaseCalled {
		return
	}
	s.Rollout().Restarts--
	s.Task.DueAt = again
	s.back(time.Time{})
}

// Device notes what the device runs, and what it is to run.
func (s *Step) Device(c *DeviceCheck, target string, foreign, single bool) {
	r := s.Rollout()
	s.Task.Before, s.Task.Target = c.ELF, target
	r.Board, r.Hardware, r.Display, r.Foreign, r.Single, r.Checks = c.Board, c.Hardware, c.Display, foreign, single, 0
}

// MayOffer reports whether a running task may have an offer: its job goes on, and it has one left or its offer is repeated.
func (s *Step) MayOffer() bool {
	p := s.Task.Phase
	return (p == PhaseCalled || p == PhaseOffered) && s.Job.State == Running && s.Job.Until.After(s.Now) && (s.Rollout().Offers < s.maxOffers() || s.CanRepeat())
}

// GiveBack returns a running task without a download to waiting; one without an offer left ends.
func (s *Step) GiveBack() {
	switch {
	case s.Task.Phase != PhaseCalled && s.Task.Phase != PhaseOffered:
	case s.Rollout().Offers >= s.maxOffers():
		s.fail(CodeNotFetched, detailNotFetched)
	default:
		s.back(time.Time{})
	}
}

const detailNotFetched = "the device fetched none of its offers; look whether it reaches --public-device-url (`fleetd doctor`)"

// OfferAgain repeats the last offer, uncounted: the answer to the check before was lost.
func (s *Step) OfferAgain() {
	s.begin()
	s.enter(PhaseOffered, offeredTime)
}

// Cut notes that the end of the node cut the download: it is neither a flash nor an offer.
func (s *Step) Cut() {
	if s.Task.Phase == PhaseLoading {
		s.Rollout().Offers--
		s.back(time.Time{})
	}
}

// CanRepeat reports whether a check may have the last offer again: it was made a short time ago, and no byte was fetched.
func (s *Step) CanRepeat() bool {
	return (s.Task.Phase == PhaseOffered || s.IsUnfetched() && s.hasRoom()) && s.Now.Before(s.Rollout().OfferedAt.Add(sameOffer))
}

// Offer counts an offer, of an image of size bytes under a token, to the check from an address.
func (s *Step) Offer(token, from string, size int64) {
	s.begin()
	r := s.Rollout()
	r.Offers++
	r.Unheard = 0
	r.Token, r.From, r.OfferedAt, r.Bytes, r.Size, r.Flashed = token, from, s.Now, 0, size, false
	s.enter(PhaseOffered, offeredTime)
}

// Fetch notes a GET of the last offer, and reports whether it counts: only the first one, from where the check came. One that comes late
// begins the task again, if its job has room for it.
func (s *Step) Fetch(from string, ahead bool) bool {
	if s.Rollout().From != from || s.Task.Phase != PhaseOffered && (ahead || !s.IsUnfetched() || !s.hasRoom()) {
		return false
	}
	s.begin()
	s.Rollout().OfferedAt = time.Time{}
	s.enter(PhaseLoading, loadingTime)
	return true
}

// IsUnfetched reports whether the task waits again because nobody has fetched its last offer in time.
func (s *Step) IsUnfetched() bool {
	r := s.Task.Rollout
	return s.Task.State == TaskWaiting && r != nil && r.Token != "" && !r.OfferedAt.IsZero()
}

func (s *Step) hasRoom() bool {
	room := s.Job.Room(s.Now)
	return room.Has(s.Task.Attempt > 0)
}

// Loaded notes how many bytes of the image were sent; the last one is a flash.
func (s *Step) Loaded(bytes int64) {
	if s.Task.Phase != PhaseLoading {
		return
	}
	r := s.Rollout()
	if r.Bytes = bytes; bytes < r.Size {
		s.enter(PhaseLoading, loadingTime)
		return
	}
	r.flash()
	s.Flashed = true
	s.enter(PhaseBooting, bootingTime)
}

// flash counts the flash of the last offer, once: its end may be seen at the last byte, at the next check, or later.
func (r *Rollout) flash() {
	if !r.Flashed {
		r.Flashed = true
		r.Flashes++
	}
}

// Break notes that the download broke.
func (s *Step) Break() {
	if s.Task.Phase != PhaseLoading {
		return
	}
	r := s.Rollout()
	r.Broken++
	pause := firstPause
	if r.Broken > 1 {
		pause = secondPause
	}
	if r.Broken >= maxBroken || r.Offers >= s.maxOffers() {
		s.fail(CodeDownload, "the download broke each time; look at the network of the device and at the proxy before the nodes (`fleetd doctor`)")
		return
	}
	s.back(s.Now.Add(pause))
}

// back returns the running task to waiting, with no offer before a time. It ends instead if its job is cancelled.
func (s *Step) back(offerAfter time.Time) {
	t := s.Task
	if s.Job.State == Cancelled {
		s.end(CancelledT, "", "")
		return
	}
	t.State, t.Phase, t.LimitAt = TaskWaiting, PhaseNone, offerAfter
	if r := s.Rollout(); r.Offers+r.Restarts == 0 { // nothing has left
		t.Attempt--
		s.Job.Return(t)
	} else {
		s.Job.Retried()
	}
	if offerAfter.After(t.DueAt) {
		t.DueAt = offerAfter
	}
	if s.Job.Spec.Action.Firmware.Restart == "never" || s.Rollout().Restarts >= MaxRestarts {
		t.DueAt = NotByItself
	}
}

// end ends the task, whether it runs or waits.
func (s *Step) end(o Outcome, code, detail string) {
	t := s.Task
	if t.State == TaskRunning {
		s.Job.Record(t, o)
	} else {
		s.Job.RecordWaiting(t, o)
	}
	t.State, t.Phase, t.LimitAt, t.Outcome, t.Code, t.Detail, t.EndedAt = TaskEnded, PhaseNone, time.Time{}, o, code, detail, s.Now
	if t.Rollout != nil {
		t.Rollout.Token, t.Rollout.Harmed = "", false
	}
}

// Refuse ends a task for which the device may not get the image.
func (s *Step) Refuse(code, detail string) { s.end(Refused, code, detail) }

// RefuseOther refuses a task of a rollback if the device runs another image than the one that the rollback takes away, and reports whether it did.
func (s *Step) RefuseOther(elf string) bool {
	r := s.Task.Rollout
	other := r != nil && differ(r.Replaces, elf)
	if other {
		s.Refuse(CodeOtherImage, "the device runs another image than the one that the rollback takes away; roll out the image that it should have")
	}
	return other
}

// Already ends a task whose device runs the image. The device may have it from an offer of this task, if no check could be recorded since.
func (s *Step) Already() {
	if s.IsBack(s.Task.Target) {
		s.Task.Rollout.flash()
	}
	s.end(Already, "", "")
}

func (s *Step) fail(code, detail string) { s.end(Failed, code, detail) }

// isLastFlash reports whether the device had all flashes that it may have without the image.
func (r *Rollout) isLastFlash() bool { return r.Flashes-r.Excused >= MaxFlashes }

// failFlashed ends a task whose device got the image, and does not run it.
func (s *Step) failFlashed(code, detail string) {
	if s.Rollout().isLastFlash() {
		s.Bar = detail
	}
	s.fail(code, detail)
}

// flashFailed notes a flash that did not end with the image: the stop rule counts it at once.
func (s *Step) flashFailed(code, detail string) {
	if r := s.Rollout(); r.isLastFlash() || r.Offers >= s.maxOffers() {
		s.failFlashed(code, detail)
		return
	}
	s.Task.Code, s.Task.Detail = code, detail
	s.back(s.Now.Add(firstPause))
	if s.Task.State == TaskWaiting {
		s.Job.Harm(s.Task)
	}
}

// See moves a running task on by what the device said at a check. Afterwards the task is proving, has ended, or still wants an offer.
func (s *Step) See(c *DeviceCheck) {
	t, r := s.Task, s.Rollout()
	s.Checked = t.Phase == PhaseBooting || s.IsBack(c.ELF)
	switch {
	case s.IsBack(c.ELF): // its download counted as broken
		s.begin()
		s.seeTarget(c)
	case !s.Runs():
	case c.ELF == t.Target:
		s.seeTarget(c)
	case c.ELF == t.Before && differ(c.Hardware, r.Hardware):
		s.end(Refused, CodeContested, "another device checked in with this id and the image that the device had: chip, flash or partition table differ; find the clone")
	case c.ELF != t.Before && (t.Phase == PhaseBooting || t.Phase == PhaseProving):
		s.failFlashed(CodeOtherImage, "the device runs an image that is neither the one it had nor the one it got; somebody flashed it by wire")
	case c.ELF != t.Before: // it is judged again with what it runs
		s.back(time.Time{})
	case t.Phase == PhaseBooting && r.Excused == 0 && s.Answering.After(t.LimitAt.Add(-bootingTime)) && r.Offers < s.maxOffers():
		r.Excused++
		t.Code, t.Detail = CodeRolledBack, "no node answered the first check of the device with the image, so that it came back with the former one; that does not count"
		s.back(s.Now.Add(firstPause))
	case t.Phase == PhaseBooting:
		s.flashFailed(CodeRolledBack, "the device got the image and came back with the former one: the image crashed, or the device was switched off, before its first check")
	case t.Phase == PhaseProving:
		s.fail(CodeRolledBack, detailRolledBack)
	case t.Phase == PhaseLoading:
		s.Break()
	}
}

const detailRolledBack = "the device ran the image and came back with the former one"

// IsBack reports whether a device shows the image of a task that waits, because nobody saw the end of its download.
func (s *Step) IsBack(elf string) bool {
	t := s.Task
	return t.State == TaskWaiting && t.Rollout != nil && t.Rollout.Token != "" && t.Target == elf
}

// differ reports whether two facts differ that are both known: a check may be unreadable, and old firmware says less.
func differ(a, b string) bool { return a != b && a != "" && b != "" }

func (s *Step) seeTarget(c *DeviceCheck) {
	t, r := s.Task, s.Rollout()
	r.Checks++
	switch {
	case t.Phase == PhaseProving && r.Checks >= maxChecks:
		s.fail(CodeBootLoop, "the device restarted again and again with the image")
	case t.Phase == PhaseProving:
	case isOtherBoard(c, r):
		s.Job.Halt(ReasonBoard) // whatever the stop rule says
		s.fail(CodeBoardChanged, otherBoard(c, r))
	default:
		r.flash() // the node that sent the last byte could not always say so
		r.Proven, r.WebSocket, r.Checks = GateBoot, c.WebSocket, 1
		s.enter(PhaseProving, 0)
		s.next(GateBoot)
	}
}

// isOtherBoard reports whether a check names another board or display than that with which the task began. What a check leaves out says nothing.
func isOtherBoard(c *DeviceCheck, r *Rollout) bool {
	return differ(c.Board, r.Board) || differ(c.Display, r.Display)
}

func otherBoard(c *DeviceCheck, r *Rollout) string {
	return "with the image, the device says that it is " + c.Board + " " + c.Display + ", and it was " + r.Board + " " + r.Display + ": the image is of another board"
}

// next enters the gate after one that was passed, or ends the task.
func (s *Step) next(passed string) {
	r, a := s.Rollout(), s.Job.Spec.Action.Firmware
	for _, gate := range Gates[slices.Index(Gates, passed)+1:] {
		wanted := slices.Contains(a.Gates, gate) && (gate == GateStay || !r.WebSocket)
		if !wanted {
			continue
		}
		r.Gate = gate
		switch gate {
		case GateConnect:
			s.enter(PhaseProving, connectTime)
		case GateStay:
			s.enter(PhaseProving, durationOf(a.Stay, 0))
		default:
			s.enter(PhaseProving, toolsTime)
		}
		return
	}
	r.Gate = ""
	s.end(OK, "", "")
}

// Pass notes that the device has passed a gate, if that is the next one.
func (s *Step) Pass(gate string) {
	r := s.Rollout()
	if s.Task.Phase != PhaseProving || r.Gate != gate {
		return
	}
	r.Proven = gate
	s.next(gate)
}

// FailGate notes that the device did not pass the gate that is next.
func (s *Step) FailGate(gate, detail string) {
	if s.Task.Phase == PhaseProving && s.Rollout().Gate == gate {
		s.fail(CodeGate+gate, detail)
	}
}

// Connect notes that the device has connected without a check before: one that got the last byte refused the image.
func (s *Step) Connect() {
	switch s.Task.Phase {
	case PhaseBooting:
		s.flashFailed(CodeImageRefused, "the device got the whole image, refused it, and went on with the former one; its log says why")
	case PhaseLoading:
		s.Break()
	case PhaseProving:
		s.Pass(GateConnect)
	}
}

// Expire ends a phase whose time has passed.
func (s *Step) Expire() {
	t, r := s.Task, s.Rollout()
	if t.LimitAt.After(s.Now) {
		return
	}
	switch t.Phase {
	case PhaseCalled:
		if !s.Heard {
			r.Unheard++
		}
		if !s.Heard && (r.Unheard >= maxUnheard || r.Restarts >= MaxRestarts) {
			s.fail(CodeNoCheck, "the device was told to restart, and made no OTA check; restart it by hand")
			return
		}
		s.back(time.Time{})
	case PhaseOffered:
		if r.Offers >= s.maxOffers() {
			s.fail(CodeNotFetched, detailNotFetched)
			return
		}
		s.back(s.Now.Add(firstPause))
	case PhaseLoading:
		s.Break()
	case PhaseBooting:
		if r.Foreign {
			if s.Job.Astray++; s.Job.Astray >= maxAstray {
				s.Job.Halt(ReasonAstray)
			}
		}
		s.failFlashed(CodeLost, "the device got the whole image and did not come back within 15 minutes")
	case PhaseProving:
		if r.Gate == GateStay {
			s.Pass(GateStay)
			return
		}
		s.fail(CodeGate+r.Gate, map[string]string{GateConnect: "the device runs the image and did not connect", GateTools: "the device did not list its tools", GateStatus: "the device did not answer self.get_device_status"}[r.Gate])
	}
}

// Correct corrects the outcome of an ended task by what a later check shows. With its image, what was wrong is that the device had not come
// back with it; with the former one, that it had stayed. That never continues a halted job, nor halts one, but for a device that is another
// board with the image.
func (s *Step) Correct(c *DeviceCheck) {
	t, r := s.Task, s.Task.Rollout
	switch {
	case t.State != TaskEnded:
	case c.ELF != t.Target:
		if t.Outcome == OK && c.ELF == t.Before {
			s.Job.Correct(t, Failed)
			t.Outcome, t.Code, t.Detail, t.Late = Failed, CodeRolledBack, detailRolledBack, true
		}
	case t.Outcome == Failed && r != nil && isOtherBoard(c, r):
		s.Job.Halt(ReasonBoard)
		t.Code, t.Detail, t.Late = CodeBoardChanged, otherBoard(c, r), true
	case t.Outcome == Failed && slices.Contains([]string{CodeLost, CodeRolledBack, CodeImageRefused, CodeDownload, CodeNotFetched, CodeNoCheck}, t.Code), t.Outcome == Unknown:
		s.Job.Correct(t, OK)
		if t.Code == CodeLost && r != nil && r.Foreign {
			s.Job.Astray = max(0, s.Job.Astray-1)
		}
		t.Outcome, t.Code, t.Detail, t.Late = OK, "", "", true
	}
}

func (t *Task) isProvable() bool { return t.Rollout != nil && t.Rollout.Provable }

// IsHarmed reports whether the stop rule counts an open task: its last flash did not end with the image. Whatever ends it but its device
// does so as failed, by its code.
func (t *Task) IsHarmed() bool { return t.Rollout != nil && t.Rollout.Harmed }

// Harm counts an open task for the stop rule, once.
func (j *Job) Harm(t *Task) {
	if t.IsHarmed() {
		return
	}
	t.Rollout.Harmed = true
	before := j.done()
	j.Harmed++
	j.judge(before, true)
}

// BeginsByItself reports whether the tasks of a job begin without a check of their devices.
func (j *Job) BeginsByItself() bool {
	f := j.Spec.Action.Firmware
	return f == nil || f.Restart != "never"
}

// IsRollout reports whether the tasks of the job belong to their rows.
func (j *Job) IsRollout() bool { return j.Spec.Action.Firmware != nil }

// IsGateFailure reports whether a task failed because the image does not work on the device, so that a rollback helps.
func IsGateFailure(code string) bool {
	return code == CodeBootLoop || strings.HasPrefix(code, CodeGate)
}
