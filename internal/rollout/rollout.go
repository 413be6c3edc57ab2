// Package rollout moves firmware tasks on. A call's task belongs to the process that runs it; a firmware task belongs to its row: OTA
// checks, downloads, connections and the periodic work move it on, on whichever node they happen, each with one conditional update
// under the lock of its job. Nothing is kept in memory but the places of downloads. The rules are jobs.Step.
package rollout

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/jobs"
	"fleetd/internal/preflight"
	"fleetd/internal/tasks"
	"fleetd/internal/timescale"
)

// checkTime is how long the answer to an OTA check waits for the database. Without it the device starts without an offer.
var checkTime = timescale.Patience(250 * time.Millisecond)

const (
	// imageTime is how long that answer waits for an image that this node does not have yet.
	imageTime  = 3 * time.Second
	stepTime   = 10 * time.Second // of one step that nobody waits for
	retryWait  = time.Second
	checkLooks = 3 // looks, retryWait apart, before a device that connects counts as one that has not checked in
	drainLook  = 50 * time.Millisecond
	clockError = 100 * time.Millisecond // of the measured clock of the database
	overdue    = 500                    // tasks of one pass of the periodic work
)

// Fleet is what a Service uses of the core.
type Fleet interface {
	// Views returns those of the devices that are known, with their rows.
	Views(ctx context.Context, ids []devices.ID) ([]devices.View, error)
	Catalog(ctx context.Context, h devices.Hash) (*catalog.Catalog, error)
	IsContested(id devices.ID, now time.Time) bool
	CallTool(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error)
}

// Images keeps and judges images: firmware.Manager.
type Images interface {
	JudgeCheck(ctx context.Context, image string, allow []string, v *devices.View, details string, seen func(newest devices.DeviceImage) bool) (preflight.Offer, error)
	File(ctx context.Context, id string) (*os.File, error)
}

// Options of a Service. All are required.
type Options struct {
	Store  jobs.Store
	Fleet  Fleet
	Images Images
	// Active reports whether there are firmware jobs, as far as this node knows: without them a check costs nothing.
	Active func() bool
	// MayBegin reports whether tasks may begin: the node is not stopping, and its lease is valid.
	MayBegin func() bool
	// MayAct returns why the owner of a job may not have it done on a device any more, or nil; with CodeUnauthorized its key has ended.
	MayAct func(ctx context.Context, owner string, id devices.ID) *devices.Error
	// Nodes returns the nodes that run, with when they started; this one is always among them.
	Nodes func() []devices.Node
	// Newest returns the last image that was recorded of each device.
	Newest func(ctx context.Context, ids []devices.ID) (map[devices.ID]devices.DeviceImage, error)
	// Downloads is how many devices may have an offer or a download of this node at once.
	Downloads int
	// Publish publishes an event.
	Publish func(devices.Event)
	Log     *slog.Logger
}

// Service is safe for concurrent use.
type Service struct {
	Options
	places places
	called called
	tasks  *tasks.Group

	// Offers counts what became of checks of devices with a firmware task: offered, repeated, unready (no image, or no database), crowded,
	// waiting, refused. Downloads counts complete, broken, and cut by the end of the node.
	Offers    counters.Map[string]
	Downloads counters.Map[string]
}

// New returns a Service.
func New(o Options) *Service {
	s := &Service{Options: o, tasks: tasks.New(o.Log), places: places{limit: o.Downloads, list: map[string]*place{}}}
	for _, result := range []string{offered, repeated, unready, crowded, waiting, refused} {
		s.Offers.Add(result, 0)
	}
	for _, result := range []string{complete, broken, cut} {
		s.Downloads.Add(result, 0)
	}
	return s
}

// Results of Offers and Downloads.
const (
	offered  = "offered"
	repeated = "repeated"
	unready  = "unready"
	crowded  = "crowded"
	waiting  = "waiting"
	refused  = "refused"
	complete = "complete"
	broken   = "broken"
	cut      = "cut"
)

// Drain waits until the downloads of this node have ended, at most for so long.
func (s *Service) Drain(limit time.Duration) {
	for end := time.Now().Add(limit); s.places.loading() > 0 && time.Now().Before(end); {
		time.Sleep(drainLook)
	}
}

// Close waits for what was begun.
func (s *Service) Close() {
	s.tasks.Close()
	s.tasks.Wait()
}

// Check is an OTA check of an admitted device.
type Check struct {
	Device  devices.ID
	Facts   devices.Facts
	Details string
	Address netip.Addr
	Begun   time.Time // before what was recorded of it
	// WebSocket is whether the answer sends the device there; Activation whether it has a code.
	WebSocket, Activation bool
}

// Offer is the section of the answer that has the device fetch an image.
type Offer struct {
	Version string
	Token   string // in the address of the download
	Force   bool
}

// Check moves the task of a device on by what it said, and returns the image that the answer offers; nil: none.
func (s *Service) Check(ctx context.Context, c *Check) *Offer {
	if !s.Active() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), checkTime)
	defer cancel()
	o, err := s.Store.Outlook(ctx, c.Device, c.Facts.ELF)
	var queue []jobs.Queued
	if err == nil && (o.Moves || s.mayOffer(&o, c)) {
		queue, err = s.Store.Rolling(ctx, c.Device)
	}
	if err != nil {
		s.Offers.Add(unready, 1)
		return nil
	}
	at := slices.IndexFunc(queue, func(q jobs.Queued) bool {
		step := jobs.Step{Job: &q.Job, Task: &q.Task}
		return step.Runs() || step.IsBack(c.Facts.ELF)
	})
	if at < 0 && o.Unconfirmed { // its task has ended before it came back
		s.confirm(c.Device)
	}
	if len(queue) == 0 {
		return nil
	}
	seen := deviceCheck(&c.Facts, c.Details, c.Address, c.WebSocket)
	if at >= 0 {
		task, err := s.see(ctx, &queue[at].Task, &seen, c)
		if err != nil {
			s.Offers.Add(unready, 1)
			return nil
		}
		if queue[at].Task = task; task.State == jobs.TaskEnded || task.Phase == jobs.PhaseProving {
			return nil
		}
	}
	for i := range queue {
		if o := s.offer(ctx, &queue[i], c, &seen); o != nil {
			return o
		}
	}
	return nil
}

// mayOffer reports whether the answer to a check may offer an image for a task that waits. Most checks during a rollout end here.
func (s *Service) mayOffer(o *jobs.Outlook, c *Check) bool {
	result := crowded
	switch {
	case !o.Ready || c.Activation || !s.MayBegin():
		result = waiting
	case s.places.free(addressText(c.Address)):
		return true
	}
	s.Offers.Add(result, o.Open)
	return false
}

// confirm takes the mark of a device away. The answer to its check does not wait for that.
func (s *Service) confirm(id devices.ID) {
	s.tasks.Run(func() {
		ctx, cancel := context.WithTimeout(s.tasks.Context(), stepTime)
		defer cancel()
		if err := s.Store.ConfirmImage(ctx, id); err != nil {
			s.Log.Debug("it was not recorded that a device has checked in", "device", id, "error", err)
		}
	})
}

// see applies a check to a running task. A device that has booted the image and fallen back shows what its last check showed, so that the event is
// published here.
func (s *Service) see(ctx context.Context, t *jobs.Task, seen *jobs.DeviceCheck, c *Check) (task jobs.Task, err error) {
	fell := false
	task, err = s.Store.Step(ctx, t.Job, t.Device, func(step *jobs.Step, _ bool) error {
		if fell = step.Task.Phase == jobs.PhaseBooting && seen.ELF == step.Task.Before; fell {
			first := slices.MinFunc(s.Nodes(), func(a, b devices.Node) int { return a.Started.Compare(b.Started) })
			step.Answering = s.asStored(first.Started)
		}
		step.See(seen)
		return nil
	})
	if fell && err == nil && task.Outcome != jobs.Refused { // as a clone's check
		change := devices.ImageChange{Device: c.Device, From: devices.DeviceImage{ELF: task.Target, Version: task.Rollout.Version},
			To: devices.DeviceImage{ELF: seen.ELF, Version: c.Facts.Firmware, Board: seen.Board, Cause: devices.CauseRolledBack, At: c.Begun}}
		s.Publish(change.Event())
	}
	return task, err
}

// deviceCheck is what a check says for the rules. Details that cannot be read leave the hardware empty.
func deviceCheck(f *devices.Facts, details string, address netip.Addr, webSocket bool) jobs.DeviceCheck {
	c := jobs.DeviceCheck{ELF: f.ELF, Board: f.Board, From: addressText(address), WebSocket: webSocket}
	d := devices.ParseDetails(details)
	if d.Unreadable {
		return c
	}
	table := sha256.New()
	fmt.Fprint(table, d.Table)
	c.Hardware = fmt.Sprintf("%s %d %d %x", f.Chip, d.Chip.Revision, d.FlashSize, table.Sum(nil)[:8])
	if d.Display.Width > 0 {
		c.Display = fmt.Sprintf("%dx%d", d.Display.Width, d.Display.Height)
	}
	return c
}

func addressText(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	return a.Unmap().String()
}

// errWait is the error of a step that changes nothing.
var errWait = errors.New("the task may not begin now")

// asStored returns the earliest time of a row that was written after t, a time of this node. Rows have the time of the database, if the node's is off
// by a second or more.
func (s *Service) asStored(t time.Time) time.Time {
	ahead := clock.Now().Sub(s.Store.Now())
	if ahead < 0 && ahead > -2*time.Second {
		ahead = 0
	}
	return t.Add(-ahead - clockError)
}

// offer counts an offer for a task, if the device may get the image now.
func (s *Service) offer(ctx context.Context, q *jobs.Queued, c *Check, seen *jobs.DeviceCheck) *Offer {
	now, f := s.Store.Now(), q.Job.Spec.Action.Firmware
	early := jobs.Step{Job: &q.Job, Task: &q.Task, Now: now}
	if f == nil || c.Activation || !s.MayBegin() || s.Fleet.IsContested(c.Device, clock.Now()) || !early.Runs() && !early.MayBegin(true) {
		s.Offers.Add(waiting, 1)
		return nil
	}
	fresh, result := tokenOf(&q.Task), waiting
	token := fresh
	if !early.Runs() && !s.places.take(fresh, seen.From) { // before what costs, and before checks without a place queue for the job
		s.Offers.Add(crowded, 1)
		return nil
	}
	defer func() {
		if result != offered { // a repeated offer has its place by its own token
			s.places.release(fresh)
		}
	}()
	v := devices.View{Device: devices.Device{ID: c.Device, Facts: c.Facts, Admission: devices.AdmissionMember}}
	o, err := s.Images.JudgeCheck(ctx, f.Image, f.Allow, &v, c.Details, func(newest devices.DeviceImage) bool {
		return newest.ELF == c.Facts.ELF && (newest.SeenTwice || newest.At.Before(s.asStored(c.Begun)))
	})
	if err == nil && o.Verdict == preflight.Fit {
		err = s.ready(ctx, o.ID)
	}
	if err != nil {
		s.Offers.Add(unready, 1)
		return nil
	}
	no := s.MayAct(ctx, q.Job.Owner, c.Device)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), checkTime)
	defer cancel()
	_, err = s.Store.Step(ctx, q.Task.Job, c.Device, func(step *jobs.Step, ahead bool) error {
		token, result = fresh, waiting // the transaction may be repeated
		again := step.Runs() && step.CanRepeat()
		if again {
			token = step.Rollout().Token
		}
		switch {
		case no != nil:
			forbid(step, no)
			return nil
		case !step.Runs() && (ahead || !step.MayBegin(true)):
			return errWait
		case step.Runs() && !step.MayOffer():
			step.GiveBack()
			return nil
		case o.Verdict != preflight.Fit:
			result = apply(step, &o.Judgment)
			return nil
		case step.RefuseOther(c.Facts.ELF):
			result = refused
			return nil
		case !s.places.take(token, seen.From):
			result = crowded
			step.GiveBack()
			return nil
		}
		step.Device(seen, o.ELF, o.Foreign, o.Single)
		step.Rollout().Version = o.Version
		if again {
			result = repeated
			step.OfferAgain()
			return nil
		}
		result = offered
		step.Offer(token, seen.From, o.Size)
		return nil
	})
	if err != nil && !errors.Is(err, errWait) {
		result = unready
	}
	s.Offers.Add(result, 1)
	if result != offered && result != repeated {
		return nil
	}
	return &Offer{Version: o.Version, Token: token, Force: o.Force}
}

// forbid refuses a task whose owner may not have it done, or halts its job if the owner's key has ended.
func forbid(step *jobs.Step, no *devices.Error) {
	switch no.Code {
	case devices.CodeForbidden:
		step.Refuse(string(no.Code), no.Detail)
	case devices.CodeUnauthorized:
		step.GiveBack()
		step.Job.Halt(jobs.ReasonKey)
	default: // it is not known yet
		step.GiveBack()
	}
}

// apply ends a task, or leaves it waiting, by a judgment other than fit.
func apply(step *jobs.Step, j *preflight.Judgment) (result string) {
	switch j.Verdict {
	case preflight.Already:
		step.Already()
	case preflight.Blocked:
		step.Refuse(j.Code, j.Text)
		return refused
	default:
		step.GiveBack()
	}
	return waiting
}

// ready reports whether this node has an image, which it fetches first.
func (s *Service) ready(ctx context.Context, image string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), imageTime)
	defer cancel()
	file, err := s.Images.File(ctx, image)
	if err != nil {
		return err
	}
	return file.Close()
}

// tokenOf returns a new token: the task that it is of, and a secret. Its row has the token, so that it is valid until the task ends, whatever
// becomes of the fleet's secret.
func tokenOf(t *jobs.Task) string {
	return t.Device.Token() + "-" + t.Job + "-" + strings.ToLower(rand.Text())
}

// parseToken returns the task that a token is of.
func parseToken(token string) (device devices.ID, job string, ok bool) {
	parts := strings.Split(token, "-")
	n := len(parts) - 2 // an id may have dashes
	if n < 1 {
		return "", "", false
	}
	device, err := devices.ParseID(strings.Join(parts[:n], "-"))
	return device, parts[n], err == nil && jobs.IsID(parts[n])
}

// Restart begins a waiting task whose device is connected here, by having the device told to restart. send sends that, after a last
// permission. It reports when to look at the task again; zero: whoever moves it on next does.
func (s *Service) Restart(ctx context.Context, job *jobs.Job, id devices.ID, send func(permit func() error) error) (again time.Duration) {
	f := job.Spec.Action.Firmware
	ctx, cancel := context.WithTimeout(ctx, stepTime)
	defer cancel()
	queue, err := s.Store.Rolling(ctx, id)
	if slices.ContainsFunc(queue, func(q jobs.Queued) bool { return q.Job.ID == job.ID && q.Job.IsFullFor(&q.Task) }) {
		return 10 * retryWait
	}
	v, no := s.view(ctx, id)
	if err = errors.Join(err, no); err != nil {
		return retryWait
	}
	o, err := s.Images.JudgeCheck(ctx, f.Image, f.Allow, &v, "", func(newest devices.DeviceImage) bool { return true }) // the check that follows is the second
	if err == nil && o.Verdict == preflight.Fit {
		err = s.ready(ctx, o.ID)
	}
	if err != nil {
		s.Log.Warn("a firmware task cannot begin: the database or the image is not at hand; it is tried again", "job", job.ID, "device", id, "error", err)
		return 10 * retryWait
	}
	unconfirmed, err := s.isUnconfirmed(ctx, &v)
	if err != nil || unconfirmed {
		return 10 * retryWait
	}
	seen := deviceCheck(&v.Device.Facts, o.Details, netip.Addr{}, false)
	called, forbidden := false, s.MayAct(ctx, job.Owner, id)
	_, err = s.Store.Step(ctx, job.ID, id, func(step *jobs.Step, ahead bool) error {
		called = false
		switch {
		case forbidden != nil:
			forbid(step, forbidden)
			return nil
		case ahead || !step.MayBegin(false) || !s.MayBegin():
			return errWait
		case o.Verdict != preflight.Fit:
			apply(step, &o.Judgment)
			return nil
		case step.RefuseOther(v.Device.ELF):
			return nil
		}
		step.Device(&seen, o.ELF, o.Foreign, o.Single)
		step.Rollout().Catalog, step.Rollout().CheckedAt = catalogText(&v), v.Device.CheckedAt
		step.Call()
		called = true
		return nil
	})
	if errors.Is(err, errWait) || err != nil || !called {
		return retryWait
	}
	asked := time.Now()
	permitted := false
	err = send(func() error {
		if time.Since(asked) > stepTime || !s.MayBegin() {
			return errWait
		}
		permitted = true
		return nil
	})
	if err == nil || permitted { // its bytes may have left
		s.called.add(id)
		return 0
	}
	s.step(patience, job.ID, id, func(step *jobs.Step) { step.NotCalled(step.Now.Add(retryWait)) })
	return retryWait
}

func catalogText(v *devices.View) string {
	if v.Presence.Partial {
		return ""
	}
	return v.Presence.Catalog.String()
}

// isUnconfirmed reports whether the device has a new image that it may not have confirmed: a restart would undo the upgrade. While there are
// firmware jobs, its next check takes the mark away; else the time of that check says whether it came, by the clock of the node that took it.
func (s *Service) isUnconfirmed(ctx context.Context, v *devices.View) (bool, error) {
	marks, err := s.Store.Marks(ctx, []devices.ID{v.Device.ID})
	since := marks[v.Device.ID].Unconfirmed
	return !since.IsZero() && (s.Active() || !v.Device.CheckedAt.After(since)), err
}

// MayRestart returns why a device must not restart now, or nil. Without the database that is not known, and nobody restarts it.
func (s *Service) MayRestart(ctx context.Context, id devices.ID) *devices.Error {
	ctx, cancel := context.WithTimeout(ctx, stepTime)
	defer cancel()
	marks, err := s.Store.Marks(ctx, []devices.ID{id})
	if err == nil && marks[id].Unconfirmed.IsZero() {
		return nil
	}
	v, no := s.view(ctx, id)
	if err = errors.Join(err, no); err != nil {
		return devices.Errorf(devices.CodeUnavailable, "the database does not say whether the device has confirmed its firmware image; repeat the restart later")
	}
	if unconfirmed, err := s.isUnconfirmed(ctx, &v); unconfirmed || err != nil {
		return devices.Errorf(jobs.CodeUnconfirmed, "the device has a new firmware image and has made no OTA check with it yet: a restart would bring the former image back; wait until it has checked in")
	}
	return nil
}

// view returns a device with its row: what the holder has in memory may be older than the check, which another node has written.
func (s *Service) view(ctx context.Context, id devices.ID) (devices.View, error) {
	list, err := s.Fleet.Views(ctx, []devices.ID{id})
	if err == nil && len(list) == 0 {
		err = devices.Errorf(devices.CodeDeviceUnknown, "device %s is not known", id)
	}
	if err != nil {
		return devices.View{}, err
	}
	return list[0], nil
}

// step makes a step of the task of a device that nobody waits for, again and again until the database takes it, for at most so long.
func (s *Service) step(patience time.Duration, job string, id devices.ID, f func(*jobs.Step)) (task jobs.Task, err error) {
	for begun := time.Now(); ; {
		ctx, cancel := context.WithTimeout(context.Background(), stepTime)
		task, err = s.Store.Step(ctx, job, id, func(step *jobs.Step, _ bool) error {
			f(step)
			return nil
		})
		cancel()
		if err == nil || errors.Is(err, devices.ErrNotFound) || time.Since(begun) > patience {
			return task, err
		}
		time.Sleep(retryWait)
	}
}

// patience is how long a step is tried again while the database is away. The periodic work finds later what it would have said.
const patience = 2 * time.Minute

// Expire ends the phases whose time has passed. What a check has said meanwhile, which no step could be made of, counts first.
func (s *Service) Expire(ctx context.Context) error {
	list, err := s.Store.Overdue(ctx, overdue)
	for i := range list {
		t := &list[i]
		var seen *jobs.DeviceCheck
		heard := false
		if t.Phase != jobs.PhaseProving {
			if seen, heard, err = s.last(ctx, t); err != nil {
				return err
			}
		}
		_, err := s.Store.Step(ctx, t.Job, t.Device, func(step *jobs.Step, _ bool) error {
			if step.Task.LimitAt.After(step.Now) {
				return errWait
			}
			if seen != nil && step.Runs() {
				step.See(seen)
				return nil
			}
			step.Heard = heard
			step.Expire()
			return nil
		})
		if err != nil && !errors.Is(err, errWait) && !errors.Is(err, devices.ErrNotFound) {
			return err
		}
	}
	return err
}

// last returns what a device said at its last check, if that showed the image of its task: when the task began, the device ran another. heard is whether
// it has checked in since it was told to restart.
func (s *Service) last(ctx context.Context, t *jobs.Task) (seen *jobs.DeviceCheck, heard bool, err error) {
	v, err := s.view(ctx, t.Device)
	if err != nil || t.Rollout == nil {
		if devices.CodeOf(err) == devices.CodeDeviceUnknown {
			err = nil
		}
		return nil, false, err
	}
	if heard = !v.Device.CheckedAt.Equal(t.Rollout.CheckedAt); v.Device.ELF != t.Target {
		return nil, heard, nil
	}
	newest, err := s.Newest(ctx, []devices.ID{t.Device})
	if err != nil {
		return nil, heard, err
	}
	image := newest[t.Device]
	if image.ELF != t.Target { // it is written with the check that shows it
		image.Details = ""
	}
	c := deviceCheck(&v.Device.Facts, image.Details, netip.Addr{}, false)
	return &c, heard, nil
}

// Connected implements session.Lifecycle: a device that connects without a check has refused the image, or its download broke.
func (s *Service) Connected(id devices.ID, _ string) {
	s.called.remove(id)
	s.look(id, false)
}

// Ready implements session.Lifecycle: the device's tools are known.
func (s *Service) Ready(id devices.ID, _ string) { s.look(id, true) }

// Gone implements session.Lifecycle.
func (s *Service) Gone(id devices.ID, _ string, _ devices.CloseReason) { s.called.remove(id) }

// CheckedIn implements session.Lifecycle.
func (s *Service) CheckedIn(devices.Check) {}

func (s *Service) look(id devices.ID, ready bool) {
	if !s.Active() {
		return
	}
	s.tasks.Run(func() {
		for begun, looks := time.Now(), 0; time.Since(begun) < patience && s.tasks.Context().Err() == nil; time.Sleep(retryWait) {
			looks++
			if err := s.connected(s.tasks.Context(), id, ready, looks > checkLooks); err == nil {
				return
			}
		}
	})
}

// connected moves the running task of a device on that has connected; with ready, its tools are known. late is whether a check before the
// connection would be in the database by now, whichever node took it.
func (s *Service) connected(ctx context.Context, id devices.ID, ready, late bool) error {
	queue, err := s.Store.Rolling(ctx, id)
	if err != nil || len(queue) == 0 || queue[0].Task.State != jobs.TaskRunning {
		return err
	}
	t := queue[0].Task
	seen, _, err := s.last(ctx, &t)
	if err != nil {
		return err
	}
	if t.Phase == jobs.PhaseBooting && seen == nil && !late {
		return errWait
	}
	if t.Phase != jobs.PhaseProving || t.Rollout.Gate == jobs.GateConnect {
		if t, err = s.Store.Step(ctx, t.Job, id, func(step *jobs.Step, _ bool) error {
			if seen != nil && step.Runs() && step.Task.Phase != jobs.PhaseProving {
				step.See(seen) // the step of its check could not be made
			}
			step.Connect()
			return nil
		}); err != nil {
			return err
		}
	}
	if !ready || t.Phase != jobs.PhaseProving {
		return nil
	}
	if t.Rollout.Gate == jobs.GateTools {
		lost, err := s.lostTools(ctx, id, &queue[0].Job, &t)
		if err != nil {
			return err
		}
		if t, err = s.gate(ctx, &t, jobs.GateTools, lost); err != nil {
			return err
		}
	}
	if t.Phase != jobs.PhaseProving || t.Rollout.Gate != jobs.GateStatus {
		return nil
	}
	no := ""
	if r, err := s.Fleet.CallTool(ctx, devices.ToolCall{Device: id, Tool: statusTool, Principal: asJob, Job: t.Job}); isPassing(err) {
		return errWait // until the limit of the gate
	} else if err != nil {
		no = devices.AsError(err).Detail
	} else if r.IsError {
		no = "the tool reported an error"
	}
	if no != "" {
		no = statusTool + ": " + no
	}
	_, err = s.gate(ctx, &t, jobs.GateStatus, no)
	return err
}

// isPassing reports whether an error of a call says nothing about the image: calls pass while a device is proved, and may have all its slots, and
// it may connect again.
func isPassing(err error) bool {
	return err != nil && slices.Contains([]devices.Code{devices.CodeDeviceBusy, devices.CodeDeviceOffline, devices.CodeSuperseded, devices.CodeConnectionLost,
		devices.CodeDeviceTimeout, devices.CodeUnavailable, devices.CodeRateLimited}, devices.CodeOf(err))
}

// gate notes that a device has passed a gate, or why it has not.
func (s *Service) gate(ctx context.Context, t *jobs.Task, gate, no string) (jobs.Task, error) {
	return s.Store.Step(ctx, t.Job, t.Device, func(step *jobs.Step, _ bool) error {
		if no != "" {
			step.FailGate(gate, no)
			return nil
		}
		step.Pass(gate)
		return nil
	})
}

// lostTools returns which of its former tools the device lacks, as a sentence; empty: none that matters. What a rollback takes back may have
// brought tools, which go with it.
func (s *Service) lostTools(ctx context.Context, id devices.ID, j *jobs.Job, t *jobs.Task) (string, error) {
	v, err := s.view(ctx, id)
	if err != nil {
		return "", err
	}
	if v.Presence.Partial || v.Presence.Catalog == (devices.Hash{}) {
		return "the device did not list all its tools", nil
	}
	h, err := devices.ParseHash(t.Rollout.Catalog)
	if err != nil || h == (devices.Hash{}) || h == v.Presence.Catalog || j.Spec.Action.Firmware.RollbackOf != "" {
		return "", err
	}
	before, err := s.Fleet.Catalog(ctx, h)
	if errors.Is(err, devices.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	after, err := s.Fleet.Catalog(ctx, v.Presence.Catalog)
	if err != nil {
		return "", err
	}
	if missing := missingTools(before, after, j.Spec.Action.Firmware.MayLose); len(missing) > 0 {
		return "the device lacks tools that it had: " + strings.Join(missing, ", ") + "; name them in may_lose if that is meant", nil
	}
	return "", nil
}

// Changed corrects the task of a device that shows another image than before: it may be one that was given up, or the former image of one
// that worked. What a job gives back is no reason to correct what another one gave.
func (s *Service) Changed(c devices.ImageChange) {
	targets := []string{c.To.ELF}
	if c.To.Cause != devices.CauseJob {
		targets = append(targets, c.From.ELF)
	}
	seen := deviceCheck(&devices.Facts{ELF: c.To.ELF, Board: c.To.Board}, c.To.Details, netip.Addr{}, false)
	s.tasks.Run(func() {
		ctx, cancel := context.WithTimeout(s.tasks.Context(), stepTime)
		defer cancel()
		for _, target := range targets {
			if target == "" { // which would name any task
				continue
			}
			t, err := s.Store.Rolled(ctx, c.Device, target)
			if err != nil || clock.Now().Sub(t.EndedAt) > jobs.Kept {
				continue
			}
			s.step(patience, t.Job, t.Device, func(step *jobs.Step) {
				if step.Task.Fence == t.Fence {
					step.Correct(&seen)
				}
			})
		}
	})
}
