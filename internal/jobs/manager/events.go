package manager

import (
	"encoding/json"
	"fmt"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
)

// Events returns the events of a committed transaction at this time: those of the jobs that it
// changed, then one for each task that it ended or returned to waiting after a failure.
func Events(changed []jobs.Change, ended []jobs.Task, now time.Time) (list []devices.Event) {
	byID := make(map[string]*jobs.Job, len(changed))
	var last []devices.Event // jobs end after their tasks
	for i := range changed {
		c := &changed[i]
		byID[c.Job.ID] = &c.Job
		for _, kind := range kindsOf(c) {
			e := jobEvent(&c.Job, kind, now)
			if c.Job.State.Open() {
				list = append(list, e)
			} else {
				last = append(last, e)
			}
		}
		if c.Stepped != nil {
			list = append(list, phaseEvent(&c.Job, c.Stepped, now))
		}
	}
	for i := range ended {
		if j := byID[ended[i].Job]; j != nil {
			list = append(list, taskEvent(j, &ended[i], now))
		}
	}
	return append(list, last...)
}

// kindsOf returns the kinds of events of one change, in their order.
func kindsOf(c *jobs.Change) (kinds []devices.EventKind) {
	state := c.Job.State
	_, stays := entered[state]
	if _, stayed := entered[c.From]; stayed && !stays {
		kinds = append(kinds, devices.EventJobResumed)
	}
	if c.First {
		kinds = append(kinds, devices.EventJobStarted)
	}
	if c.Job.Stage > c.FromStage && c.Job.Stage < len(c.Job.Spec.Stages) {
		kinds = append(kinds, devices.EventJobStage)
	}
	if kind, ok := entered[state]; ok && c.From != state {
		kinds = append(kinds, kind)
	}
	return kinds
}

// entered has the kinds of the states that have an event of their own.
var entered = map[jobs.State]devices.EventKind{jobs.Paused: devices.EventJobPaused, jobs.Halted: devices.EventJobHalted,
	jobs.Done: devices.EventJobDone, jobs.Cancelled: devices.EventJobCancelled}

func jobEvent(j *jobs.Job, kind devices.EventKind, now time.Time) devices.Event {
	v := jobView(j)
	return devices.Event{Kind: kind, Job: j.ID, Seq: j.Version, Time: now, MsgID: fmt.Sprintf("%s-%d-%s", j.ID, j.Version, kind),
		Fields: members(struct {
			State     string        `json:"state"`
			Reason    string        `json:"reason"`
			Action    string        `json:"action"`
			Stage     int           `json:"stage"`
			Round     int64         `json:"round"`
			Counts    api.JobCounts `json:"counts"`
			Note      string        `json:"note"`
			Owner     string        `json:"owner"`
			CreatedBy string        `json:"created_by"`
		}{v.State, v.Reason, j.Action, v.Stage, v.Round, v.Counts, j.Spec.Note, j.Owner, v.CreatedBy})}
}

func phaseEvent(j *jobs.Job, t *jobs.Task, now time.Time) devices.Event {
	return devices.Event{Kind: devices.EventJobPhase, Job: j.ID, Seq: j.Version, Time: now, Fields: members(struct {
		Device devices.ID `json:"device"`
		Phase  jobs.Phase `json:"phase"`
		Gate   string     `json:"gate"`
		Bytes  int64      `json:"bytes"`
		Size   int64      `json:"size"`
		Owner  string     `json:"owner"`
	}{t.Device, t.Phase, t.Rollout.Gate, t.Rollout.Bytes, t.Rollout.Size, j.Owner})}
}

func taskEvent(j *jobs.Job, t *jobs.Task, now time.Time) devices.Event {
	return devices.Event{Kind: devices.EventTask, Device: t.Device, Job: t.Job, Time: now, MsgID: fmt.Sprintf("%s-%s-%d-%d", t.Device.Token(), t.Job, t.Round, j.Version),
		Fields: members(struct {
			Job     string         `json:"job"`
			Round   int64          `json:"round"`
			Attempt int            `json:"attempt"`
			State   jobs.TaskState `json:"state"`
			Outcome jobs.Outcome   `json:"outcome"`
			Code    string         `json:"code"`
			Late    bool           `json:"late"`
			Call    string         `json:"call"`
			Owner   string         `json:"owner"`
		}{t.Job, t.Round, t.Attempt, t.State, t.Outcome, t.Code, t.Late, t.Call, j.Owner})}
}

// members returns the members of an object without its braces.
func members(v any) json.RawMessage {
	text, err := json.Marshal(v)
	if err != nil {
		panic("manager: " + err.Error()) // the types above encode
	}
	return text[1 : len(text)-1]
}
