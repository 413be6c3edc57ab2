package api

import (
	"encoding/json"
	"errors"
	"strconv"
	"strings"
)

// JobSpec is a job as people write it: an action, for a selection of devices, at a
// time, at a pace, with an end. The server fills in defaults.
type JobSpec struct {
	Action  JobAction  `json:"action" doc:"It says what is done on each device: exactly one member."`
	Select  string     `json:"select,omitempty" doc:"The devices, as in GET /v1/devices?select=. Either select or devices." example:"room=lab"`
	Devices []string   `json:"devices,omitempty" maxItems:"1000" doc:"These are the ids of the devices, at most 1,000."`
	Follow  bool       `json:"follow,omitempty" doc:"Devices that come to match later get a task, too; the job ends at when.until."`
	When    *JobWhen   `json:"when,omitempty"`
	Pace    *JobPace   `json:"pace,omitempty"`
	Stages  []JobStage `json:"stages,omitempty" maxItems:"20" doc:"The job goes on in stages; each opens as many tasks as it wants successes."`
	Stop    *JobStop   `json:"stop,omitempty" doc:"It says when the job halts by itself. Tasks with the outcomes failed and unknown count."`
	Retry   *JobRetry  `json:"retry,omitempty"`
	Busy    string     `json:"busy,omitempty" enum:"wait,skip" doc:"While a conversation is open on the device: wait for its end (the default of restart), or end the task as refused."`
	// Repeatable permits a second call after an unknown outcome.
	Repeatable bool   `json:"repeatable,omitempty" doc:"The action may run twice without harm: an unknown outcome is retried as a failed one."`
	Note       string `json:"note,omitempty" maxLength:"1000" doc:"The note is for people; fleetd does not read it."`
}

// NewJob is the body of POST /v1/jobs.
type NewJob struct {
	JobSpec
	Confirmation string `json:"confirmation,omitempty" doc:"The token of a 428 answer to the same job; a person has agreed."`
}

// JobAction is what a job does on each device: one of the members.
type JobAction struct {
	Call    *JobCall        `json:"call,omitempty" doc:"The job calls a tool."`
	Message json.RawMessage `json:"message,omitempty" doc:"The job sends a message, as POST /v1/devices/{device}/messages does."`
	Restart *JobRestart     `json:"restart,omitempty" doc:"The job restarts the device."`
	// Firmware gives the device an image.
	Firmware *JobFirmware `json:"firmware,omitempty" doc:"The job gives the device a firmware image, and proves that the device works with it. It needs the scope firmware, too."`
}

// JobFirmware gives a device an image.
type JobFirmware struct {
	Image string `json:"image,omitempty" doc:"SHA-256 of the image, or its first 12 digits."`
	FirmwareOptions
	// RollbackOf is set by the server alone.
	RollbackOf string `json:"rollback_of,omitempty" doc:"The job takes back what this job did. Only POST .../rollback sets it."`
}

// FirmwareOptions are how an image is rolled out.
type FirmwareOptions struct {
	Restart string   `json:"restart,omitempty" enum:"idle,never" doc:"A device asks for an image only when it starts. idle, the default, restarts a connected device while no conversation is open; never waits for its next start."`
	Gates   []string `json:"gates,omitempty" enum:"boot,connect,tools,status,stay" doc:"What the device must pass with the image, in this order: it starts, connects, has the tools that it had, answers self.get_device_status, and stays up. The default is all."`
	Stay    string   `json:"stay,omitempty" doc:"It says how long the device must stay up." example:"10m"`
	MayLose []string `json:"may_lose,omitempty" maxItems:"100" doc:"The device may lack these tools with the image."`
	OnHalt  string   `json:"on_halt,omitempty" enum:"stop,rollback" doc:"When failed gates halt the job: stop, the default, leaves the devices as they are; rollback brings them back."`
	Allow   []string `json:"allow,omitempty" enum:"project,layout,version_too_old,ota_url" doc:"Findings of the check that do not block these devices."`
}

// JobCall is a call of one tool.
type JobCall struct {
	Tool      string          `json:"tool" minLength:"1" maxLength:"256"`
	Arguments json.RawMessage `json:"arguments,omitempty" doc:"It is an object, as the tool's schema describes it."`
	Timeout   string          `json:"timeout,omitempty" doc:"Each call has this timeout, 1s to 300s, as in POST .../call." example:"30s"`
}

// JobRestart restarts a device.
type JobRestart struct {
	When string `json:"when,omitempty" enum:"idle,now" doc:"idle, the default, waits until no conversation is open."`
}

// JobWhen is when a job runs.
type JobWhen struct {
	At       Time       `json:"at,omitzero" doc:"No task begins before this time."`
	Cron     string     `json:"cron,omitempty" doc:"The job repeats at these times: five fields, minute hour day month weekday." example:"0 7 * * 1-5"`
	Timezone string     `json:"timezone,omitempty" doc:"cron and window are read in this time zone, such as Europe/Berlin. The default is the nodes' --timezone, or UTC if that is empty."`
	Until    Time       `json:"until,omitzero" doc:"Tasks that have not begun by then expire; default 24 hours after at or the creation, at most 30 days. With cron or follow: the end of the job, at most 10 years."`
	Window   *JobWindow `json:"window,omitempty" doc:"Tasks begin only inside it."`
}

// JobWindow is a time that repeats.
type JobWindow struct {
	Cron string `json:"cron" doc:"The window begins at these times: five fields." example:"0 2 * * *"`
	For  string `json:"for" doc:"It says how long it is open, 1m to 7d." example:"3h"`
}

// JobPace limits how fast tasks begin, over all nodes.
type JobPace struct {
	Rate        string `json:"rate,omitempty" doc:"So many tasks begin in a second, a minute or an hour: 20/s, 30/m, 100/h. unlimited sets no limit. The default is 20/s." example:"30/m"`
	Concurrency int    `json:"concurrency,omitempty" minimum:"0" maximum:"100000" doc:"Tasks that run at once; default 32, or stop.failed if that is less."`
}

// JobStage is a part of a job's devices that comes before the rest.
type JobStage struct {
	OK   Amount `json:"ok" doc:"It says how many tasks must end ok before the next stage, in all: a number, or a share such as 5%."`
	Soak string `json:"soak,omitempty" doc:"It says how long to wait after them." example:"30m"`
	Hold bool   `json:"hold,omitempty" doc:"With true, the job waits for POST .../advance before the next stage."`
	// Stop holds while the stage is the current one.
	Stop *JobStop `json:"stop,omitempty" doc:"The stop rule of this stage, in place of that of the job."`
}

// JobStop is when a job halts by itself: at so many failures, or at a share of the tasks
// that have ended, once there are Of of them.
type JobStop struct {
	Failed int    `json:"failed,omitempty" minimum:"0"`
	Share  string `json:"share,omitempty" example:"5%"`
	Of     int    `json:"of,omitempty" minimum:"0" doc:"The share counts once so many tasks have ended; default 20."`
}

// JobRetry is how failed tasks are repeated.
type JobRetry struct {
	Failed int    `json:"failed,omitempty" minimum:"0" maximum:"10" doc:"It says how often a failed task is repeated."`
	After  string `json:"after,omitempty" doc:"So long a pause is before the repetition. The default is 1m." example:"10m"`
}

// Amount is a number of tasks, or a share of them.
type Amount struct {
	Number  int64
	Percent float64 // if Number is 0: above 0, at most 100
}

// String returns the amount as in the command line: 5, or 5%.
func (a Amount) String() string {
	if a.Number > 0 {
		return strconv.FormatInt(a.Number, 10)
	}
	return strconv.FormatFloat(a.Percent, 'f', -1, 64) + "%"
}

// ParseAmount parses the text of String.
func ParseAmount(text string) (a Amount, err error) {
	if share, ok := strings.CutSuffix(text, "%"); ok {
		a.Percent, err = strconv.ParseFloat(share, 64)
		if err != nil || !(a.Percent > 0 && a.Percent <= 100) {
			return Amount{}, errors.New("must be a share above 0% and at most 100%, such as 5%")
		}
		return a, nil
	}
	a.Number, err = strconv.ParseInt(text, 10, 64)
	if err != nil || a.Number < 1 {
		return Amount{}, errors.New("must be a number from 1, or a share such as 5%")
	}
	return a, nil
}

// MarshalJSON encodes a number, or a share as text.
func (a Amount) MarshalJSON() ([]byte, error) {
	if a.Number > 0 {
		return strconv.AppendInt(nil, a.Number, 10), nil
	}
	return strconv.AppendQuote(nil, a.String()), nil
}

// UnmarshalJSON decodes a number, or text.
func (a *Amount) UnmarshalJSON(data []byte) (err error) {
	text := string(data)
	if len(data) > 0 && data[0] == '"' {
		if err := json.Unmarshal(data, &text); err != nil {
			return err
		}
	}
	*a, err = ParseAmount(text)
	return err
}

// Job is a job with its progress.
type Job struct {
	ID        string    `json:"id"`
	Group     string    `json:"group,omitempty" doc:"The jobs of one release have the same group."`
	State     string    `json:"state" enum:"scheduled,preparing,running,paused,halted,done,cancelled"`
	Reason    string    `json:"reason" doc:"It says why it is paused or halted, or was when it ended: stop, stage_not_passed, confirmation, key, restored, limit, select, board_changed, astray, or a person's words. While it is preparing: limit, if it waits until its tasks fit the share of its key. While it is running: hold, if its stage has passed and waits for POST .../advance."`
	Action    string    `json:"action" doc:"This is the kind of its action: call, message, restart or firmware; spec.action has all of it."`
	Select    string    `json:"select" doc:"This is the selection of spec. It is empty for all devices, and if spec names the devices."`
	Spec      JobSpec   `json:"spec" doc:"It is the job as it was given, with the defaults filled in."`
	Stage     int       `json:"stage" doc:"This is the current stage, from 1. It is 0 without stages."`
	Round     int64     `json:"round" doc:"It says how often a repeating job has fired. It is 0 otherwise."`
	NextAt    Time      `json:"next_at" doc:"It says when it fires next, or begins. It is null if it has."`
	Until     Time      `json:"until"`
	Counts    JobCounts `json:"counts"`
	Missed    int64     `json:"missed" doc:"Firings that no node was there for, or that came while the round before was prepared."`
	CreatedBy string    `json:"created_by" doc:"This is the name of the key."`
	CreatedAt Time      `json:"created_at"`
	BegunAt   Time      `json:"begun_at" doc:"Its first task began at this time. It is null if none has."`
	EndedAt   Time      `json:"ended_at" doc:"It is null while the job is open."`
}

// JobCounts are the numbers of a job's tasks, over all rounds that are kept.
type JobCounts struct {
	Total      int64 `json:"total"`
	Waiting    int64 `json:"waiting"`
	Running    int64 `json:"running"`
	OK         int64 `json:"ok"`
	Failed     int64 `json:"failed"`
	Unknown    int64 `json:"unknown"`
	Refused    int64 `json:"refused"`
	Expired    int64 `json:"expired"`
	Cancelled  int64 `json:"cancelled"`
	Already    int64 `json:"already"`
	Superseded int64 `json:"superseded"`
	Gone       int64 `json:"gone"`
}

// Task is a job for one device in one round.
type Task struct {
	Job        string `json:"job"`
	Round      int64  `json:"round"`
	Device     string `json:"device"`
	State      string `json:"state" enum:"waiting,running,ended"`
	Reason     string `json:"reason" doc:"It says why it waits. It is empty unless it does." enum:",offline,asleep,later,window,stage,pace,paused,halted,order,busy,retry,database,node"`
	DueAt      Time   `json:"due_at" doc:"The task does not begin before this time. It is null if the task is due."`
	Attempt    int    `json:"attempt"`
	Outcome    string `json:"outcome" doc:"It says how it ended. It is empty while it is open." enum:",ok,failed,unknown,refused,expired,cancelled,already,superseded,gone"`
	Code       string `json:"code" doc:"The error code, or tool_error, or sent: written, and devices do not answer it."`
	Detail     string `json:"detail"`
	Result     string `json:"result" doc:"The tool answered this text, at most 4 KiB of it."`
	Late       bool   `json:"late,omitempty" doc:"The answer came after the call's deadline."`
	Node       string `json:"node" doc:"This node began it last."`
	Call       string `json:"call" doc:"Id of the last call, as in the audit."`
	BegunAt    Time   `json:"begun_at"`
	EndedAt    Time   `json:"ended_at"`
	DurationMS int64  `json:"duration_ms"`
	// Firmware is set for firmware tasks that have begun.
	Firmware *TaskFirmware `json:"firmware,omitempty"`
}

// TaskFirmware is how far a firmware task has come.
type TaskFirmware struct {
	Phase    string `json:"phase" doc:"What the task waits for: called, the device was told to restart; offered, it may fetch the image; loading; booting, it has the image; proving. It is empty unless the task runs." enum:",called,offered,loading,booting,proving"`
	Gate     string `json:"gate" doc:"The gate that the device is to pass next. It is empty unless the phase is proving." enum:",connect,tools,status,stay"`
	Proven   string `json:"proven" doc:"The last gate that the device has passed." enum:",boot,connect,tools,status,stay"`
	Before   string `json:"elf_before" doc:"ELF SHA-256 of what the device ran when the task began."`
	Offers   int    `json:"offers"`
	Flashes  int    `json:"flashes" doc:"So many times the device got the last byte of the image."`
	Restarts int    `json:"restarts" doc:"So many times the device was told to restart."`
	Bytes    int64  `json:"bytes" doc:"So many bytes of the last download were sent."`
	Size     int64  `json:"size" doc:"The image has so many bytes."`
}

// JobPlan is what a dry run reports.
type JobPlan struct {
	Spec      JobSpec      `json:"spec" doc:"The defaults are filled in."`
	Devices   int64        `json:"devices" doc:"It says how many devices the selection has now."`
	Online    int64        `json:"online" doc:"It says how many of these are connected."`
	AtRisk    int64        `json:"at_risk" doc:"It says how many devices can fail or get lost before the job halts by itself."`
	NextAt    Time         `json:"next_at"`
	Refusals  []JobRefusal `json:"refusals" nullable:"false" doc:"It says what would be refused, by reason."`
	Confirm   []string     `json:"confirm" nullable:"false" doc:"Rules that ask for a confirmation of the job."`
	Estimated string       `json:"estimated" doc:"It says how long the pace takes for the connected devices."`
	Already   int64        `json:"already,omitempty" doc:"So many devices run the image of a firmware job already."`
	NoWayBack int64        `json:"no_way_back,omitempty" doc:"So many devices would get the image and could not get back what they run, since that is not stored or would not fit."`
}

// JobRefusal is a reason for which tasks would be refused.
type JobRefusal struct {
	Code    string   `json:"code"`
	Detail  string   `json:"detail"`
	Count   int64    `json:"count"`
	Devices []string `json:"devices" nullable:"false" doc:"The list has the first ten."`
}

// JobEdit changes a job that has not ended; absent members stay.
type JobEdit struct {
	Pace  *JobPace `json:"pace,omitempty"`
	Until *Time    `json:"until,omitempty"`
	Note  *string  `json:"note,omitempty" maxLength:"1000"`
	Stop  *JobStop `json:"stop,omitempty"`
	// IfMatch is the Revision that the change was made from; empty: any.
	IfMatch string `json:"-"`
}

// FirmwareRoll rolls out a release: the members of a job, whose action is the images of the release.
type FirmwareRoll struct {
	Release      string          `json:"release" example:"xiaozhi@2.4.2" doc:"Project and version, or the version alone if one project has it."`
	Firmware     FirmwareOptions `json:"firmware,omitzero"`
	Select       string          `json:"select,omitempty" doc:"The devices, as in GET /v1/devices?select=. Either select or devices." example:"room=lab"`
	Devices      []string        `json:"devices,omitempty" maxItems:"1000"`
	Follow       bool            `json:"follow,omitempty"`
	When         *JobWhen        `json:"when,omitempty"`
	Pace         *JobPace        `json:"pace,omitempty"`
	Stages       []JobStage      `json:"stages,omitempty" maxItems:"20"`
	Stop         *JobStop        `json:"stop,omitempty"`
	Note         string          `json:"note,omitempty" maxLength:"1000"`
	Confirmation string          `json:"confirmation,omitempty"`
}

// Spec is the job of one image of the release.
func (r *FirmwareRoll) Spec(image string) JobSpec {
	return JobSpec{Action: JobAction{Firmware: &JobFirmware{Image: image, FirmwareOptions: r.Firmware}}, Select: r.Select, Devices: r.Devices, Follow: r.Follow,
		When: r.When, Pace: r.Pace, Stages: r.Stages, Stop: r.Stop, Note: r.Note}
}

// JobGroup are jobs that were created together: one for each image.
type JobGroup struct {
	Group string `json:"group"`
	Items []Job  `json:"items" nullable:"false"`
	// Unreachable counts devices that a rollback cannot bring back now.
	Unreachable int64 `json:"unreachable,omitempty" doc:"So many devices of a rollback are not connected, or the image that they had is not stored."`
}

// FirmwareRollPlan is what a dry run of a rollout reports: a plan for each image.
type FirmwareRollPlan struct {
	Items []JobPlan `json:"items" nullable:"false"`
}
