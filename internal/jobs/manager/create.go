package manager

import (
	"context"
	crand "crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/jobs"
	"fleetd/internal/selector"
	"fleetd/internal/timespan"
)

// CreateOptions are what comes with a new job.
type CreateOptions struct {
	Key          string // Idempotency-Key; empty: none
	Confirmation string // the token of a refusal with CodeConfirmation; empty: none

	judge    bool // the call is refused now if its one device would refuse it
	rollback bool // the job takes back another one
}

// Create commits a job as the caller. again means that the key and the body are those of an
// earlier job, which is returned. An error of CodeConfirmation has a token for the same caller
// and body.
func (m *Manager) Create(ctx context.Context, p access.Principal, spec api.JobSpec, o CreateOptions) (j api.Job, again bool, err error) {
	j, again, err = m.create(ctx, p, spec, jobs.HashOf(&spec), o)
	if !again { // a repeated request changes nothing
		m.Fleet.NoteChange(p, "create job", "", "job "+j.ID, err)
	}
	return j, again, err
}

// Later commits a call of one device as a job that expires after later. timeout is that of the
// call, zero for the tool's default; key is an Idempotency-Key, empty for none. Errors are as
// of Create.
func (m *Manager) Later(ctx context.Context, p access.Principal, call devices.ToolCall, timeout, later time.Duration, key string) (j api.Job, again bool, err error) {
	spec, hash := laterSpec(&call, timeout, later)
	spec.When = &api.JobWhen{Until: api.At(m.Store.Now().Add(later))}
	j, again, err = m.create(ctx, p, spec, hash, CreateOptions{Key: key, Confirmation: call.Confirmation, judge: true})
	if !again {
		m.Fleet.NoteChange(p, "create job", call.Device, "job "+j.ID+" calls "+devices.Clip(call.Tool)+" later", err)
	}
	return j, again, err
}

// laterSpec is the job of a call without its deadline, which a repetition of the call has another one of, and the hash of both.
func laterSpec(call *devices.ToolCall, timeout, later time.Duration) (spec api.JobSpec, hash string) {
	spec = api.JobSpec{Devices: []string{string(call.Device)}, Action: api.JobAction{Call: &api.JobCall{Tool: call.Tool, Arguments: call.Arguments}}}
	if timeout > 0 {
		spec.Action.Call.Timeout = timespan.Format(timeout)
	}
	return spec, jobs.HashOf(&spec) + "-" + timespan.Format(later)
}

// Queued returns the job that Later has made of the same call and key before; found is false if there is none. The error
// has CodeConflict if the key was used for something else.
func (m *Manager) Queued(ctx context.Context, p access.Principal, call devices.ToolCall, timeout, later time.Duration, key string) (j api.Job, found bool, err error) {
	_, hash := laterSpec(&call, timeout, later)
	return m.repeated(ctx, p, key, hash)
}

// repeated returns the job that was created with a key and hash before; found is false if there is none.
func (m *Manager) repeated(ctx context.Context, p access.Principal, key, hash string) (j api.Job, found bool, err error) {
	switch stored, err := m.Store.Repeated(ctx, p.Owner(), key, hash); {
	case errors.Is(err, devices.ErrNotFound):
		return j, false, nil
	case err != nil:
		return j, false, err
	default:
		return jobView(&stored), true, nil
	}
}

func (m *Manager) create(ctx context.Context, p access.Principal, spec api.JobSpec, hash string, o CreateOptions) (out api.Job, again bool, err error) {
	if o.Key != "" && !jobs.IsKey(o.Key) {
		return out, false, devices.Errorf(devices.CodeBadRequest, "the Idempotency-Key must have 1 to 128 printable ASCII characters")
	}
	if o.Key != "" {
		if err := m.Fleet.Permit(ctx, p, access.ScopeJobs, ""); err != nil {
			return out, false, err
		}
		// Before the rules are asked: the confirmation was used by the first request.
		if out, again, err = m.repeated(ctx, p, o.Key, hash); again || err != nil {
			return out, again, err
		}
	}
	now := m.Store.Now()
	d, err := m.draft(ctx, p, &spec, now, o)
	if err == nil && spec.Action.Firmware != nil {
		err = m.checkEligible(ctx, p, &spec, d.selection)
	}
	if err != nil {
		return out, false, err
	}
	if o.judge {
		if err := m.judge(ctx, p, &spec); err != nil {
			return out, false, err
		}
	}
	if len(d.confirm) > 0 {
		if err := m.confirm(ctx, p, hash, d.confirm, o.Confirmation); err != nil {
			return out, false, err
		}
	}
	j := jobs.New(spec, p.Owner(), p.Name(), d.selection.String(), now)
	j.Key, j.Hash, j.Confirmed = o.Key, hash, d.confirm
	var rows []jobs.Task
	if len(spec.Devices) > 0 && !j.IsRollout() && j.Due(now) && j.Fire(now) {
		for _, id := range spec.Devices {
			rows = append(rows, taskOf(&j, devices.ID(id), j.CreatedAt))
		}
	}
	stored, again, err := m.Store.Create(ctx, j, rows)
	if err != nil {
		return out, false, err
	}
	if !again {
		m.Poke()
	}
	return jobView(&stored), again, nil
}

// judge returns why a call of named devices would be refused now, by their last known tools.
func (m *Manager) judge(ctx context.Context, p access.Principal, spec *api.JobSpec) error {
	w := planner{m: m, p: p, spec: spec, catalogs: map[devices.Hash]*catalog.Catalog{}}
	ids := make([]devices.ID, len(spec.Devices))
	for i, id := range spec.Devices {
		ids[i] = devices.ID(id)
	}
	views, err := m.Fleet.Views(ctx, ids)
	for i := range views {
		if no := w.judge(ctx, &views[i]); no != nil {
			return no
		}
	}
	return err
}

// taskOf returns the row of a device's task; at orders the queue of the device.
func taskOf(j *jobs.Job, id devices.ID, at time.Time) jobs.Task {
	return jobs.Task{Job: j.ID, Round: j.Round, Device: id, Seq: at.UnixMicro(), Spread: jobs.Spread(j.ID, id), State: jobs.TaskWaiting}
}

// draft is a checked job that was not created.
type draft struct {
	selection selector.Selector
	confirm   []string // rules that require a confirmation
}

// draft checks a job and the caller's rights, and fills in defaults.
func (m *Manager) draft(ctx context.Context, p access.Principal, spec *api.JobSpec, now time.Time, o CreateOptions) (d draft, err error) {
	if err := m.Fleet.Permit(ctx, p, access.ScopeJobs, ""); err != nil {
		return d, err
	}
	if err := jobs.Check(spec, m.Zone, now); err != nil {
		return d, err
	}
	if f := spec.Action.Firmware; f != nil {
		if err := m.resolve(ctx, f, o); err != nil {
			return d, err
		}
	}
	if d.confirm, err = m.permitAction(ctx, p, spec); err != nil {
		return d, err
	}
	if len(spec.Devices) == 0 {
		if d.selection, err = selector.Parse(spec.Select); err != nil {
			return d, devices.Errorf(devices.CodeBadRequest, "select: %v", err)
		}
		if p.Caller.Limited() {
			d.selection = selector.And(p.Caller.Devices, d.selection)
			if _, err := selector.Parse(d.selection.String()); err != nil { // it is stored as text
				return d, devices.Errorf(devices.CodeBadRequest, "select and the limit of this key to %d bytes of terms are too long together, at most %d bytes; write a shorter select, or name devices",
					len(p.Caller.Devices.String()), selector.MaxText)
			}
		}
		return d, m.checkSize(ctx, d.selection, access.Share(jobs.MaxOpenTasks, nil, p.Owner(), m.Holder))
	}
	for _, id := range spec.Devices {
		if err := m.Fleet.Permit(ctx, p, access.ScopeJobs, devices.ID(id)); err != nil {
			return d, err
		}
		if err := m.Fleet.Registry().CheckReady(); err != nil {
			return d, err
		}
		if !m.Fleet.Registry().Status(devices.ID(id), "").Known {
			return d, devices.Errorf(devices.CodeDeviceUnknown, "device %s is not known; a job is only for devices of the fleet", id)
		}
	}
	d.selection = selector.In(selector.FieldDevice, spec.Devices...)
	return d, nil
}

// permitAction returns an error if the caller may not have the action of a job done, and the rules that require a
// confirmation. It is asked when a job is created, and for every change after which more of it happens.
func (m *Manager) permitAction(ctx context.Context, p access.Principal, spec *api.JobSpec) (confirm []string, err error) {
	action, known := jobs.ActionOf(&spec.Action)
	if !known {
		return nil, devices.Errorf(devices.CodeConflict, "this version of fleetd does not know the action of the job; repeat the request at a node of the version that created it")
	}
	return action.Permit(rights{ctx, m, p})
}

// rights implements jobs.Rights.
type rights struct {
	ctx context.Context
	m   *Manager
	p   access.Principal
}

func (r rights) Call(tool string, arguments json.RawMessage) (confirm []string, err error) {
	g := r.m.Fleet.Guard()
	confirm, no := g.JobRules(access.Query{By: r.p, Tool: tool})
	if no == nil {
		no = g.CheckURL(tool, arguments)
	}
	if no != nil {
		return nil, dispatch.RefusalError(no)
	}
	return confirm, nil
}

func (r rights) Firmware() error { return r.m.Fleet.Permit(r.ctx, r.p, access.ScopeFirmware, "") }

func (r rights) Message(body json.RawMessage) error { return r.m.Fleet.PermitMessage(r.ctx, r.p, body) }

// checkSize refuses a selection with more devices than its key could have open tasks if there were no others.
func (m *Manager) checkSize(ctx context.Context, sel selector.Selector, most int64) error {
	n, err := m.count(ctx, sel, most)
	if err == nil && n > most {
		return devices.Errorf(devices.CodeLimitReached, "the selection has %d devices, and this key may have %d open tasks at most (of %d of the fleet); select fewer", n, most, jobs.MaxOpenTasks)
	}
	return err
}

// count returns how many devices a selection has, or more if that is at most enough.
func (m *Manager) count(ctx context.Context, sel selector.Selector, enough int64) (int64, error) {
	if n := int64(m.Fleet.Registry().Members()); n <= enough {
		return n, nil
	}
	counts, err := m.Fleet.Counts(ctx, access.Principal{Caller: access.Admin, Via: access.ViaJob}, sel)
	return counts.Total, err
}

// sizeOf returns how many devices the selection of a job has, or more if that is at most enough.
func (m *Manager) sizeOf(ctx context.Context, j *jobs.Job, enough int64) (int64, error) {
	if n := len(j.Spec.Devices); n > 0 {
		return int64(n), nil
	}
	sel, err := selector.Parse(j.Devices)
	if err != nil {
		return 0, err
	}
	return m.count(ctx, sel, enough)
}

// confirm accepts the token of an earlier refusal, once, or refuses with a new one.
func (m *Manager) confirm(ctx context.Context, p access.Principal, hash string, rules []string, token string) error {
	detail := fmt.Sprintf("the rule %s requires a person's confirmation: repeat the same job with this confirmation within %d min; it holds for all calls of the job",
		rules[0], int(jobs.ConfirmLifetime/time.Minute))
	if token != "" {
		known, err := m.Store.TakeConfirm(ctx, digestOf(token), p.Key(), p.Owner()+" "+hash)
		switch {
		case err == nil && !slices.ContainsFunc(rules, func(r string) bool { return !slices.Contains(known, r) }):
			return nil
		case err != nil && devices.AsError(err).Code != devices.CodeNotFound:
			return err
		}
		detail = "the confirmation belongs to another job, was used, or has expired; " + detail
	}
	fresh := crand.Text()
	if err := m.Store.Confirm(ctx, digestOf(fresh), p.Key(), p.Owner()+" "+hash, rules); err != nil {
		return err
	}
	return &devices.Error{Code: devices.CodeConfirmation, Detail: detail, Rule: rules[0], Confirmation: fresh}
}

// Decline makes the confirmation of a job that a person did not confirm invalid. It always returns an
// error.
func (m *Manager) Decline(ctx context.Context, p access.Principal, action, confirmation string) error {
	var err error = &devices.Error{Code: devices.CodeConfirmation, Rule: access.RuleDeclined, Detail: "the person did not confirm the job; nothing was created"}
	if no := m.Store.DropConfirm(ctx, digestOf(confirmation), p.Key()); no != nil {
		err = no
	}
	m.Fleet.NoteChange(p, action, "", "declined", err)
	return err
}

func digestOf(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}
