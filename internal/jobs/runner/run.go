package runner

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/jobs"
	"fleetd/internal/jsonspan"
)

// run is one task that has begun.
type run struct {
	r         *Runner
	task      jobs.Task
	job       jobs.Job
	slot      *dispatch.Reservation
	asked     time.Time // before the commit of its beginning, by the monotonic clock
	permitted bool      // its bytes may have left
}

// do sends the task and records how it ended.
func (t *run) do() {
	end := t.result(jobs.Unknown, string(devices.CodeInternal), "internal error (bug)")
	defer func() { t.finish(end) }() // also if it panics
	end = t.send()
}

func (t *run) finish(end jobs.End) {
	t.slot.Release()
	t.r.setRunning(t.task.Device, "")
	t.r.ends.add(end)
}

// result returns how the task ended.
func (t *run) result(o jobs.Outcome, code, detail string) jobs.End {
	return jobs.End{Job: t.task.Job, Round: t.task.Round, Device: t.task.Device, Fence: t.task.Fence, Outcome: o, Code: code, Detail: devices.Cut(detail, jobs.MaxDetail)}
}

func (t *run) again(pause time.Duration) jobs.End {
	return notSent(&t.task, t.r.Store.Now().Add(pause))
}

// hold is again for what the device's other tasks would meet, too: none of them may overtake.
func (t *run) hold(pause time.Duration) jobs.End {
	end := notSent(&t.task, time.Time{})
	end.Pause = pause
	return end
}

func (t *run) halt(reason string) jobs.End {
	end := notSent(&t.task, time.Time{})
	end.Halt = reason
	return end
}

var (
	errLate  = errors.New("the commit is too long ago")
	errOwner = errors.New("the owner's key has ended")
)

// permit is called last before bytes leave: the beginning must be recent, so that a process that
// did not run meanwhile, and counts as lost, sends nothing.
func (t *run) permit() error {
	if time.Since(t.asked) > sendTime || !t.r.MayBegin() {
		return errLate
	}
	t.permitted = true
	return nil
}

// principal returns the caller as whom the task acts; ok is false if this node does not have its
// key yet.
func (r *Runner) principal(owner string) (p access.Principal, ok bool, err error) {
	p.Via = access.ViaJob
	p.Caller, err = r.Devices.Keys().Acting(owner, r.Open, clock.Now())
	switch {
	case errors.Is(err, access.ErrToken):
		return p, false, nil
	case err != nil:
		return p, true, errOwner
	}
	return p, true, nil
}

func (t *run) send() jobs.End {
	p, ok, err := t.r.principal(t.job.Owner)
	switch {
	case err != nil:
		return t.halt(jobs.ReasonKey)
	case !ok:
		return t.again(refreshEvery)
	case t.job.Spec.Busy == "skip" && t.slot.IsTalking():
		return t.result(jobs.Refused, string(devices.CodeDeviceBusy), "a conversation is open on the device")
	case t.job.AwaitsIdle() && t.slot.IsTalking():
		return t.again(talkingAfter)
	}
	t.r.stats.Waited.Observe(max(0, t.r.Store.Now().Sub(time.UnixMicro(t.task.Seq))))
	action, known := jobs.ActionOf(&t.job.Spec.Action)
	if !known { // the pump leaves such a job alone
		return t.hold(againAfter)
	}
	if jobs.Restarts(&t.job.Spec.Action) {
		if no := t.r.Rollouts.MayRestart(t.r.tasks.Context(), t.task.Device); no != nil {
			return t.result(jobs.Refused, string(no.Code), no.Detail)
		}
	}
	call := t.r.Devices.NewCallID()
	r, err := action.Begin(sender{t, p, call})
	end := t.answered(&r)
	if err != nil {
		end = t.failed(err)
	}
	end.Call = call
	return end
}

// sender implements jobs.Sender for one task.
type sender struct {
	t    *run
	p    access.Principal
	call string // id
}

func (s sender) Message(body json.RawMessage) error {
	t := s.t
	ctx, cancel := context.WithTimeout(t.r.tasks.Context(), dispatch.DefaultTimeout)
	defer cancel()
	return t.slot.Message(ctx, devices.Message{ID: s.call, Device: t.task.Device, Body: body, Principal: s.p, Job: t.job.ID}, t.permit)
}

func (s sender) Call(tool string, arguments json.RawMessage, timeout time.Duration) (devices.ToolResult, error) {
	t := s.t
	timeout = cmp.Or(timeout, dispatch.TimeoutFor(tool))
	ctx, cancel := context.WithTimeout(t.r.tasks.Context(), timeout)
	defer cancel()
	late := func(r devices.ToolResult, err error) {
		if err != nil {
			return
		}
		end := t.answered(&r)
		end.Late, end.Call = true, s.call
		t.r.ends.add(end)
	}
	return t.slot.Call(ctx, devices.ToolCall{ID: s.call, Device: t.task.Device, Tool: tool, Arguments: arguments, Principal: s.p,
		Job: t.job.ID, Confirmed: t.job.Confirmed, Late: late}, t.permit)
}

// answered is the end of a task whose device answered, or restarts.
func (t *run) answered(r *devices.ToolResult) jobs.End {
	end := t.result(jobs.OK, r.Outcome, "")
	if r.IsError {
		end.Outcome, end.Code = jobs.Failed, jobs.CodeToolError
	}
	end.Result = devices.Cut(textOf(r.Content), jobs.MaxResult)
	return end
}

// detailOf is the detail of an error with what is wrong where.
func detailOf(e *devices.Error) string {
	text, sep := e.Detail, ": "
	for _, fault := range e.Faults {
		text += sep + strings.TrimSpace(fault.Pointer+" "+fault.Detail)
		sep = "; "
	}
	return text
}

// failed is the end of a task with an error.
func (t *run) failed(err error) jobs.End {
	if errors.Is(err, errLate) {
		return t.hold(0)
	}
	e := devices.AsError(err)
	switch e.Code {
	case devices.CodeConfirmation:
		return t.halt(jobs.ReasonConfirmation)
	case devices.CodeUnauthorized:
		return t.halt(jobs.ReasonKey)
	case devices.CodeForbidden, devices.CodeToolDenied, devices.CodeInvalidArguments, devices.CodeToolUnknown, devices.CodeBadRequest, devices.CodeTooLarge:
		if t.permitted { // by the device
			return t.result(jobs.Failed, string(e.Code), detailOf(e))
		}
		return t.result(jobs.Refused, string(e.Code), detailOf(e))
	case devices.CodeDeviceError:
		return t.result(jobs.Failed, string(e.Code), detailOf(e))
	}
	if e.Sent {
		return t.result(jobs.Unknown, string(e.Code), detailOf(e))
	}
	return t.hold(againAfter)
}

// textOf returns the text of the content items of an answer.
func textOf(content json.RawMessage) string {
	var texts []string
	for walk := jsonspan.Array(content); walk.Next(); {
		if text, ok := jsonspan.String(jsonspan.Member(walk.Value(), "text")); ok {
			texts = append(texts, text)
		}
	}
	return strings.Join(texts, "\n")
}
