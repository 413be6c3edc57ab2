package firmware

import "context"

// keepJobs is the largest queue whose memory a device keeps for the next one.
const keepJobs = 4

// jobKind is what a job of the main loop does.
type jobKind uint8

const (
	jobTool jobKind = iota
	jobResult
	jobError
	jobText
	jobSpeech
	jobSilence
	jobDo
)

// job is one entry of the main loop's queue (Application::Schedule).
type job struct {
	kind jobKind
	id   int32
	tool *tool
	args []arg
	// marker is the argument by which the report counts executions.
	marker string
	// text is the result JSON, the error message or the whole message to send.
	text string
	// do may wait; it never runs on the goroutine that reads the socket.
	do func()
}

func (j *job) blocks() bool { return j.kind == jobDo || (j.kind == jobTool && j.tool.blocking) }

// post queues a job. Nothing runs until somebody calls pump.
func (d *Device) post(j job) {
	d.mu.Lock()
	if !d.stopped {
		d.jobs = append(d.jobs, j)
	}
	d.mu.Unlock()
}

// pump runs the main loop unless it runs already. The reader calls it with inline set: quick jobs then run on the
// reader's goroutine, which saves a goroutine per device, and the first one that waits takes the rest of the loop with
// it to a goroutine of its own.
func (d *Device) pump(inline bool) {
	d.mu.Lock()
	if d.looping || len(d.jobs) == 0 {
		d.mu.Unlock()
		return
	}
	d.looping = true
	d.mu.Unlock()
	d.loop(nil, inline)
}

// loop takes jobs in batches, as the firmware does (main/application.cc:251-258): what a batch schedules runs after the
// whole batch. That is why errors and lists overtake the results of earlier tool calls.
func (d *Device) loop(batch []job, inline bool) {
	for {
		for i := range batch {
			if inline && batch[i].blocks() {
				rest := batch[i:]
				d.fleet.spawn(func(context.Context) { d.loop(rest, false) })
				return
			}
			d.run(&batch[i])
			if d.restarted() {
				break
			}
		}
		clear(batch)
		d.mu.Lock()
		if cap(batch) > 0 && cap(batch) <= keepJobs {
			d.spare = batch[:0]
		}
		batch, d.jobs, d.spare = d.jobs, d.spare, nil
		if len(batch) == 0 {
			d.looping = false
			d.mu.Unlock()
			return
		}
		d.mu.Unlock()
	}
}

// restarted reports, once, that the chip was restarted and what it was doing is lost.
func (d *Device) restarted() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	was := d.restart
	d.restart = false
	return was || d.stopped
}

func (d *Device) run(j *job) {
	switch j.kind {
	case jobTool:
		d.runTool(j)
	case jobResult:
		d.sendMCP(j.id, `,"result":`, j.text, `}}`)
	case jobError:
		// Nothing is escaped here: that is the firmware's own defect.
		d.sendMCP(j.id, `,"error":{"message":"`, j.text, `"}}}`)
	case jobText:
		d.sendText(j.text)
	case jobSpeech, jobSilence:
		d.sendMicrophone(j.kind == jobSpeech)
	case jobDo:
		j.do()
	}
}

// runTool executes a tool and schedules its reply; up to v2.0 the reply was sent at once.
func (d *Device) runTool(j *job) {
	d.recordCall(j.id, j.tool.name, j.marker)
	reply := job{kind: jobResult, id: j.id}
	result, err := outcome{}, error(nil)
	if d.faults.has(faultUnescapedError) {
		err = errUnescaped
	} else {
		result, err = j.tool.run(d, j.args)
	}
	if err != nil {
		reply.kind, reply.text = jobError, err.Error()
	} else {
		reply.text = result.resultJSON()
	}
	if d.profile.overtaking {
		d.post(reply)
	} else {
		d.run(&reply)
	}
	d.foreignReply()
}
