package manager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/preflight"
	"fleetd/internal/selector"
)

// Firmware keeps and judges images: firmware.Manager.
type Firmware interface {
	Resolve(ctx context.Context, id string) (preflight.Ref, error)
	Release(ctx context.Context, name string) ([]preflight.Ref, error)
	ByELF(ctx context.Context, elf string) (preflight.Ref, error)
	Judge(ctx context.Context, image string, allow []string, views []devices.View) ([]preflight.Judgment, error)
}

// resolve replaces the name of an image by its id.
func (m *Manager) resolve(ctx context.Context, f *api.JobFirmware, o CreateOptions) error {
	if f.RollbackOf != "" && !o.rollback {
		return devices.Errorf(devices.CodeBadRequest, "action.firmware.rollback_of is set by POST /v1/jobs/{job}/rollback alone; leave it out")
	}
	image, err := m.Firmware.Resolve(ctx, f.Image)
	if err == nil {
		f.Image = image.ID
	}
	return err
}

// errEnough ends a walk through devices.
var errEnough = errors.New("enough")

// checkEligible refuses a firmware job that no device of its selection may get.
func (m *Manager) checkEligible(ctx context.Context, p access.Principal, spec *api.JobSpec, sel selector.Selector) error {
	if spec.Follow { // some may come
		return nil
	}
	f := spec.Action.Firmware
	first, already := preflight.Judgment{Text: "the selection has no devices"}, 0
	err := m.Fleet.Each(ctx, p, sel, func(page []devices.View) error {
		list, err := m.Firmware.Judge(ctx, f.Image, f.Allow, page)
		for i := range list {
			if list[i].Verdict == preflight.Fit || list[i].Verdict == preflight.Waiting {
				return errEnough
			}
			if list[i].Verdict == preflight.Already {
				already++
			} else {
				first = list[i]
			}
		}
		return err
	})
	switch {
	case errors.Is(err, errEnough):
		return nil
	case err != nil:
		return err
	case already > 0:
		first.Text = fmt.Sprintf("%d run it already", already)
	}
	return devices.Errorf(devices.CodeNotEligible, "no device of the selection may get the image: %s; GET /v1/firmware/check says why for each", first.Text)
}

// judged returns the rows of devices of a firmware job, as their checks say: some end at once, and devices of other boards have none in a
// job that is one of a group. A device that waits for the image waits for no older one.
func (m *Manager) judged(ctx context.Context, j *jobs.Job, rows []jobs.Task) ([]jobs.Task, error) {
	f := j.Spec.Action.Firmware
	ids := make([]devices.ID, len(rows))
	at := make(map[devices.ID]int, len(rows))
	for i := range rows {
		ids[i] = rows[i].Device
		at[ids[i]] = i
	}
	views, err := m.Fleet.Views(ctx, ids)
	if err != nil {
		return nil, err
	}
	list, err := m.Firmware.Judge(ctx, f.Image, f.Allow, views)
	if err != nil {
		return nil, err
	}
	former := map[devices.ID]string{}
	wanted, given := "", ""
	if f.RollbackOf != "" {
		image, err := m.Firmware.Resolve(ctx, f.Image)
		if err == nil {
			wanted = image.ELF
			former, err = m.Store.ChangedOf(ctx, f.RollbackOf, ids)
		}
		if err == nil {
			given, err = m.givenBy(ctx, f.RollbackOf)
		}
		if err != nil {
			return nil, err
		}
	}
	out := rows[:0:0]
	var waiting []devices.ID
	for i := range views {
		task, no := rows[at[views[i].Device.ID]], &list[i]
		switch {
		case wanted != "" && former[task.Device] != wanted:
			continue
		case wanted != "" && given != "" && !slices.Contains([]string{wanted, given, ""}, views[i].Device.ELF): // somebody has given it another one since
			continue
		case wanted != "": // it is judged when it begins: the task that it takes back may run
		case j.Group != "" && no.OtherBoard:
			continue
		case no.Verdict == preflight.Already:
			task.Outcome = jobs.Already
		case no.Code != "":
			task.Outcome, task.Code, task.Detail = jobs.Refused, no.Code, no.Text
		}
		task.Rollout = &jobs.Rollout{Provable: views[i].Presence.Transport == devices.TransportMQTT, Replaces: given}
		if f.Restart == "never" {
			task.DueAt = jobs.NotByItself
		}
		out = append(out, task)
		if task.Outcome == "" {
			waiting = append(waiting, task.Device)
		}
	}
	return out, m.Store.Supersede(ctx, j.ID, waiting)
}

// givenBy returns the ELF of the image of a job; empty: it is stored no more.
func (m *Manager) givenBy(ctx context.Context, job string) (string, error) {
	j, err := m.Store.Job(ctx, job)
	if err == nil {
		var image preflight.Ref
		if image, err = m.Firmware.Resolve(ctx, j.Spec.Action.Firmware.Image); err == nil {
			return image.ELF, nil
		}
	}
	if devices.CodeOf(err) == devices.CodeNotFound {
		err = nil
	}
	return "", err
}

// Roll rolls out a release: one job for each of its images, under one group, all or none.
func (m *Manager) Roll(ctx context.Context, p access.Principal, r api.FirmwareRoll, o CreateOptions) (out api.JobGroup, again bool, err error) {
	out, again, err = m.roll(ctx, p, r, o)
	if !again {
		m.Fleet.NoteChange(p, "roll firmware", "", "release "+devices.Clip(r.Release)+", group "+out.Group, err)
	}
	return out, again, err
}

func (m *Manager) roll(ctx context.Context, p access.Principal, r api.FirmwareRoll, o CreateOptions) (out api.JobGroup, again bool, err error) {
	confirmation := r.Confirmation
	r.Confirmation = ""
	hash := jobs.HashOf(r)
	if out, again, err := m.repeatedGroup(ctx, p, o.Key, hash); again || err != nil {
		return out, again, err
	}
	images, err := m.Firmware.Release(ctx, r.Release)
	if err != nil {
		return out, false, err
	}
	specs := make([]api.JobSpec, len(images))
	for i := range images {
		specs[i] = r.Spec(images[i].ID)
	}
	o.Confirmation = confirmation
	return m.createGroup(ctx, p, specs, hash, o)
}

// repeatedGroup returns the jobs that the same request created before: what is judged now may be different.
func (m *Manager) repeatedGroup(ctx context.Context, p access.Principal, key, hash string) (out api.JobGroup, again bool, err error) {
	if key == "" {
		return out, false, nil
	}
	first, again, err := m.repeated(ctx, p, key, hash)
	if again {
		out, err = m.group(ctx, first.Group)
	}
	return out, again, err
}

// PlanRoll reports what a rollout would do.
func (m *Manager) PlanRoll(ctx context.Context, p access.Principal, r api.FirmwareRoll) (out api.FirmwareRollPlan, err error) {
	out.Items = []api.JobPlan{}
	images, err := m.Firmware.Release(ctx, r.Release)
	if err != nil {
		return out, err
	}
	for i := range images {
		plan, err := m.plan(ctx, p, r.Spec(images[i].ID), true)
		if err != nil {
			return out, err
		}
		out.Items = append(out.Items, plan)
	}
	return out, nil
}

// createGroup creates firmware jobs that some device may get, under one group.
func (m *Manager) createGroup(ctx context.Context, p access.Principal, specs []api.JobSpec, hash string, o CreateOptions) (out api.JobGroup, again bool, err error) {
	if o.Key != "" && !jobs.IsKey(o.Key) {
		return out, false, devices.Errorf(devices.CodeBadRequest, "the Idempotency-Key must have 1 to 128 printable ASCII characters")
	}
	now := m.Store.Now()
	var list []jobs.Job
	var none error
	for i := range specs {
		spec := specs[i]
		d, err := m.draft(ctx, p, &spec, now, o)
		if err != nil {
			return out, false, err
		}
		if !o.rollback {
			if err := m.checkEligible(ctx, p, &spec, d.selection); devices.CodeOf(err) == devices.CodeNotEligible {
				none = err
				continue
			} else if err != nil {
				return out, false, err
			}
		}
		j := jobs.New(spec, p.Owner(), p.Name(), d.selection.String(), now.Add(time.Duration(i)*time.Microsecond))
		list = append(list, j)
	}
	if len(list) == 0 {
		return out, false, none
	}
	slices.SortFunc(list, func(a, b jobs.Job) int { return cmp.Compare(a.ID, b.ID) })
	for i := range list {
		list[i].Group = list[0].ID
	}
	list[0].Key, list[0].Hash = o.Key, hash
	stored, again, err := m.Store.CreateGroup(ctx, list)
	if err != nil {
		return out, false, err
	}
	if !again {
		m.Poke()
	}
	return groupView(stored), again, nil
}

func groupView(list []jobs.Job) api.JobGroup {
	out := api.JobGroup{Group: list[0].Group, Items: []api.Job{}}
	for i := range list {
		out.Items = append(out.Items, jobView(&list[i]))
	}
	return out
}

// group returns the jobs of a group.
func (m *Manager) group(ctx context.Context, id string) (api.JobGroup, error) {
	list, _, err := m.Store.Jobs(ctx, jobs.Filter{Group: id, Limit: maxLimit})
	if err != nil || len(list) == 0 {
		return api.JobGroup{}, err
	}
	slices.Reverse(list)
	return groupView(list), nil
}

// Rollback cancels the waiting tasks of a firmware job, or of all jobs of a group, and makes a job for each image that their devices had
// before. Their tasks wait for those that run.
func (m *Manager) Rollback(ctx context.Context, p access.Principal, id string, o CreateOptions) (out api.JobGroup, err error) {
	out, err = m.rollback(ctx, p, id, o)
	m.Fleet.NoteChange(p, "rollback job", "", "job "+devices.Clip(id)+", group "+out.Group, err)
	return out, err
}

func (m *Manager) rollback(ctx context.Context, p access.Principal, id string, o CreateOptions) (out api.JobGroup, err error) {
	first, err := m.job(ctx, p, access.ScopeJobs, id)
	if err == nil {
		_, err = m.permitAction(ctx, p, &first.Spec)
	}
	if err != nil {
		return out, err
	}
	return m.takeBack(ctx, p, &first, o)
}

// takeBack makes the jobs of Rollback.
func (m *Manager) takeBack(ctx context.Context, p access.Principal, j *jobs.Job, o CreateOptions) (out api.JobGroup, err error) {
	f := j.Spec.Action.Firmware
	switch {
	case f == nil:
		return out, devices.Errorf(devices.CodeConflict, "job %s gives devices no image; only a firmware job can be rolled back", j.ID)
	case f.RollbackOf != "":
		return out, devices.Errorf(devices.CodeConflict, "job %s is a rollback itself; roll out the image that the devices should have", j.ID)
	}
	halted := j.State == jobs.Halted // nothing begins, so that it is cancelled only when the jobs exist that follow it
	hash := jobs.HashOf([]string{"rollback", j.ID})
	out, again, err := m.repeatedGroup(ctx, p, o.Key, hash)
	if err == nil && !again {
		out, err = m.createBack(ctx, p, j, hash, o)
	}
	if err == nil && halted {
		_, err = m.cancel(ctx, j.ID, m.Store.Now())
	}
	return out, err
}

// createBack creates a job for each image that the devices of a job had before it, and cancels the job first unless it is halted.
func (m *Manager) createBack(ctx context.Context, p access.Principal, j *jobs.Job, hash string, o CreateOptions) (out api.JobGroup, err error) {
	changed, err := m.Store.Changed(ctx, j.ID)
	if err != nil {
		return out, err
	}
	var specs []api.JobSpec
	unstored := int64(0)
	for _, elf := range slices.Sorted(maps.Keys(changed)) {
		image, err := m.Firmware.ByELF(ctx, elf)
		if errors.Is(err, devices.ErrNotFound) {
			unstored += changed[elf]
			continue
		}
		if err != nil {
			return out, err
		}
		options := j.Spec.Action.Firmware.FirmwareOptions
		options.OnHalt = "stop"
		specs = append(specs, api.JobSpec{Action: api.JobAction{Firmware: &api.JobFirmware{Image: image.ID, FirmwareOptions: options, RollbackOf: j.ID}},
			Select: "device=*", Note: fmt.Sprintf("takes back job %s", j.ID)})
	}
	if len(specs) == 0 {
		return out, devices.Errorf(devices.CodeNotEligible, "no device of job %s can be brought back: it has changed none, or the images that the devices had are not stored (%d devices)", j.ID, unstored)
	}
	if j.State.Open() && j.State != jobs.Halted {
		if _, err := m.cancel(ctx, j.ID, m.Store.Now()); err != nil {
			return out, err
		}
	}
	o.rollback = true
	out, _, err = m.createGroup(ctx, p, specs, hash, o)
	out.Unreachable = unstored
	return out, err
}

// Unbar lifts the bar of a device.
func (m *Manager) Unbar(ctx context.Context, p access.Principal, device devices.ID) error {
	err := m.Fleet.Permit(ctx, p, access.ScopeFirmware, device)
	if err == nil {
		err = m.Store.Unbar(ctx, device)
	}
	m.Fleet.NoteChange(p, "lift firmware bar", device, "", err)
	return err
}

// FirmwareTask returns the firmware task that runs on a device, else the one that waits first, else the one that ended last, if it had begun; nil if there
// is none that the caller may see.
func (m *Manager) FirmwareTask(ctx context.Context, p access.Principal, device devices.ID) (*api.Task, error) {
	open, err := m.queue(ctx, p, device, (*jobs.Job).IsRollout)
	if err != nil {
		return nil, err
	}
	if len(open) > 0 {
		return &open[max(0, slices.IndexFunc(open, func(t api.Task) bool { return t.State == string(jobs.TaskRunning) }))], nil
	}
	ended, err := m.Store.Rolled(ctx, device, "")
	switch {
	case errors.Is(err, devices.ErrNotFound):
		return nil, nil
	case err != nil:
		return nil, err
	}
	if p.Caller.OwnJobsOnly() {
		if j, err := m.Store.Job(ctx, ended.Job); err != nil || !p.Owns(j.Owner) {
			return nil, err
		}
	}
	view := taskView(&ended, jobs.WaitNone)
	return &view, nil
}

// bringBack rolls a job back that asks for it when its gates halt it, once.
func (m *Manager) bringBack(ctx context.Context, j *jobs.Job) error {
	f := j.Spec.Action.Firmware
	if f == nil || f.OnHalt != "rollback" || j.State != jobs.Halted || j.Reason != jobs.ReasonStop {
		return nil
	}
	failed, _, err := m.Store.Tasks(ctx, jobs.TaskFilter{Job: j.ID, Outcome: jobs.Failed, Limit: maxLimit})
	if err != nil || !slices.ContainsFunc(failed, func(t jobs.Task) bool { return jobs.IsGateFailure(t.Code) }) {
		return err
	}
	p, ok := m.Owner(j.Owner)
	if !ok {
		return nil
	}
	group, err := m.takeBack(ctx, p, j, CreateOptions{Key: "rollback of " + j.ID})
	m.Fleet.NoteChange(p, "rollback job", "", "job "+j.ID+" by itself, group "+group.Group, err)
	if err != nil && devices.AsError(err).Code == devices.CodeNotEligible {
		m.Log.Warn("a halted firmware job cannot be rolled back", "job", j.ID, "error", err)
		err = nil
	}
	if err == nil {
		*j, err = m.Store.Job(ctx, j.ID)
	}
	return err
}
