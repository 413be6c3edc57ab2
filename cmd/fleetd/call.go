package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
	"fleetd/internal/timespan"
)

type callCmd struct {
	Device  string        `arg:"" help:"Id or name of the device."`
	Tool    string        `arg:"" help:"Name of the tool, as fleetd tools lists it."`
	Values  []string      `arg:"" optional:"" name:"key=value" help:"Arguments, typed as the tool wants them; key:=JSON passes JSON as it is."`
	Args    string        `help:"Arguments as one JSON object; key=value adds to it." placeholder:"JSON"`
	Timeout time.Duration `help:"How long the call may take, waiting included (at most 300s; default: 30s, camera tools 75s)." placeholder:"10s"`
	Output  string        `short:"o" help:"File for the image in the answer, or for the photo that the device took; further images get -2, -3 ... before the extension." placeholder:"FILE"`
	Later   string        `help:"If the device is not connected, call it when it is back, at most this much later; prints the job." placeholder:"24h"`
	Key     string        `help:"With --later, idempotency key: the same command again queues nothing." placeholder:"TEXT"`
	Yes     bool          `short:"y" help:"Confirm the call, if a rule of the policy requires a confirmation."`
	jsonFlags
}

// errTool is the end of a call that the device answered with a failure.
var errTool = exitError{errors.New("the tool failed on the device"), exitTool}

// Run calls the tool and prints what it answers.
func (call *callCmd) Run(ctx context.Context, a *app) error {
	if call.Timeout < 0 {
		return failed("--timeout must be above zero, not %s", call.Timeout)
	}
	given, err := splitValues(call.Values)
	if err != nil {
		return err
	}
	arguments := make(map[string]json.RawMessage)
	if call.Args != "" {
		if err := json.Unmarshal([]byte(call.Args), &arguments); err != nil || arguments == nil {
			return failed("--args must be one JSON object, such as '{\"volume\":50}'")
		}
	}
	c, err := call.client(a)
	if err != nil {
		return err
	}
	if call.Device, err = deviceID(ctx, c, call.Device, false); err != nil {
		return err
	}
	if err := call.typed(ctx, c, given, arguments); err != nil {
		return err
	}
	request := apiclient.CallRequest{Timeout: call.Timeout}
	if request.Arguments, err = json.Marshal(arguments); err != nil {
		return failed("encode the arguments: %w", err)
	}
	later, err := call.later()
	if err != nil {
		return err
	}
	result, job, err := c.CallLater(ctx, call.Device, call.Tool, request, later, call.Key)
	if problem, ok := errors.AsType[*apiclient.Problem](err); ok && problem.Confirmation != "" {
		if err := call.confirm(a, problem); err != nil {
			return err
		}
		request.Confirmation = problem.Confirmation
		result, job, err = c.CallLater(ctx, call.Device, call.Tool, request, later, call.Key)
	}
	if err != nil {
		return err
	}
	if job != "" {
		return call.queued(a, job)
	}
	if err := call.print(ctx, a, c, result); err != nil {
		return err
	}
	if result.IsError {
		return errTool
	}
	return nil
}

// later returns the duration of --later; 0 without it.
func (call *callCmd) later() (time.Duration, error) {
	if call.Later == "" {
		if call.Key != "" {
			return 0, failed("--key needs --later: a call that is made at once is never made again")
		}
		return 0, nil
	}
	d, err := timespan.Parse(call.Later)
	if err != nil || d < time.Second {
		return 0, failed("--later must be a duration from 1s to 30d, such as 24h, not %q", call.Later)
	}
	return d, nil
}

// queued reports the job that makes the call later.
func (call *callCmd) queued(a *app, job string) error {
	if call.JSON {
		return printValue(a.stdout, api.QueuedCall{Job: job})
	}
	_, err := fmt.Fprintf(a.stdout, "%s is not connected; job %s calls it when it is back: `fleetd jobs %s`\n", cleantext.Line(call.Device), job, job)
	return err
}

// confirm gets the confirmation that a rule requires from the person at the terminal.
func (call *callCmd) confirm(a *app, problem *apiclient.Problem) error {
	if call.Yes {
		return nil
	}
	question := fmt.Sprintf("Call %s on %s? The rule %s requires a confirmation.", cleantext.Line(call.Tool), cleantext.Line(call.Device), cleantext.Line(problem.Rule))
	if !a.confirmed(question) {
		return exitError{fmt.Errorf("the call of %s on %s needs a yes (rule %s); nothing was done: add --yes to confirm it", call.Tool, call.Device, problem.Rule), exitRefused}
	}
	return nil
}

// yesFlag is that of a command that deletes something.
type yesFlag struct {
	Yes bool `short:"y" help:"Delete without asking, for scripts."`
}

// ask returns nil if what the command deletes may go.
func (f yesFlag) ask(a *app, question string) error {
	if f.Yes || a.confirmed(cleantext.Line(question)) {
		return nil
	}
	return exitError{errors.New("nothing was deleted: add --yes to confirm it"), exitRefused}
}

// confirmed puts a question to the person at the terminal; without one, the answer is no.
func (a *app) confirmed(question string) bool {
	if !a.interactive {
		return false
	}
	fmt.Fprint(a.stderr, question+" [y/N] ")
	line, _ := bufio.NewReader(a.stdin).ReadString('\n') // an answer that breaks off is judged as it is
	answer := strings.ToLower(strings.TrimSpace(line))
	return answer == "y" || answer == "yes"
}

// given is one key=value of the command line.
type given struct {
	key, value string
	isJSON     bool
}

// splitValues reads key=value and key:=JSON.
func splitValues(values []string) ([]given, error) {
	var all []given
	for _, text := range values {
		key, value, found := strings.Cut(text, "=")
		key, isJSON := strings.CutSuffix(key, ":")
		if !found || key == "" {
			return nil, failed("%q is not key=value or key:=JSON", text)
		}
		if isJSON && !json.Valid([]byte(value)) {
			return nil, failed("the argument %s is not JSON: %q", key, value)
		}
		if slices.ContainsFunc(all, func(g given) bool { return g.key == key }) {
			return nil, failed("the argument %s is given twice", key)
		}
		all = append(all, given{key, value, isJSON})
	}
	return all, nil
}

// typed adds the values to the arguments, each in the type the tool's schema names. The schema is asked for only if a
// value needs it.
func (call *callCmd) typed(ctx context.Context, c *apiclient.Client, values []given, arguments map[string]json.RawMessage) error {
	var schema *tool
	if slices.ContainsFunc(values, func(g given) bool { return !g.isJSON }) {
		list, err := c.Tools(ctx, call.Device, true)
		if err != nil {
			return err
		}
		schema = findTool(list.Items, call.Tool)
	}
	for _, g := range values {
		value, err := json.RawMessage(g.value), error(nil)
		switch {
		case g.isJSON:
		case schema == nil:
			// A list may be partial or not known yet; the node that holds the device has the last word.
			value = guess(g.value)
		default:
			p := schema.InputSchema.Properties.find(g.key)
			if p == nil {
				return failed("the tool %s has no argument %s; %s", call.Tool, g.key, schema.known())
			}
			value, err = p.value(g.value)
		}
		if err != nil {
			return err
		}
		arguments[g.key] = value
	}
	return nil
}

// known lists the arguments of a tool for an error.
func (t *tool) known() string {
	if len(t.InputSchema.Properties) == 0 {
		return "it takes none"
	}
	var names []string
	for _, p := range t.InputSchema.Properties {
		names = append(names, p.name)
	}
	return "it takes " + strings.Join(names, ", ")
}

func findTool(items []json.RawMessage, name string) *tool {
	for _, raw := range items {
		var t tool
		if json.Unmarshal(raw, &t) == nil && t.Name == name {
			return &t
		}
	}
	return nil
}

// print writes text to standard output and images to files, also a photo that the device uploaded and names.
func (call *callCmd) print(ctx context.Context, a *app, c *apiclient.Client, result apiclient.CallResult) error {
	if call.JSON {
		if err := printJSON(a.stdout, result.Raw); err != nil {
			return err
		}
	}
	images := 0
	for _, item := range result.Content {
		switch {
		case item.Type == "image":
			images++
			if err := call.image(a, item, images); err != nil {
				return err
			}
		case call.JSON:
		case item.Type == "text":
			fmt.Fprintln(a.stdout, strings.TrimRight(cleantext.Lines(item.Text), "\n"))
		default:
			if err := printJSONLine(a.stdout, item.Raw); err != nil {
				return err
			}
		}
	}
	if result.Outcome == "restarting" && !call.JSON {
		fmt.Fprintln(a.stdout, "the device is restarting")
	}
	if call.Output != "" && images == 0 && !result.IsError {
		if id := uploadedPhoto(result); id != "" {
			if call.JSON {
				_, err := writeFile(call.Output, func(w io.Writer) (int64, error) { return c.Photo(ctx, id, w) })
				return err
			}
			return a.save(call.Output, func(w io.Writer) (int64, error) { return c.Photo(ctx, id, w) })
		}
		return failed("the answer holds no image, so %s was not written", call.Output)
	}
	return nil
}

// uploadedPhoto returns the id of the photo that a camera tool took: the device answers with what fleetd answered its
// upload. Empty if there is none.
func uploadedPhoto(result apiclient.CallResult) string {
	for _, item := range result.Content {
		var upload struct {
			Photo string `json:"photo"`
		}
		if json.Unmarshal([]byte(item.Text), &upload) == nil && upload.Photo != "" {
			return upload.Photo
		}
	}
	return ""
}

// image writes the n-th image of an answer to its file, or prints that there is one.
func (call *callCmd) image(a *app, item apiclient.Content, n int) error {
	data, mimeType, err := item.ImageBytes()
	if err != nil {
		return err
	}
	if call.Output == "" {
		if !call.JSON {
			fmt.Fprintf(a.stdout, "(image, %s, %d bytes: give -o FILE to keep it)\n", cmp.Or(cleantext.Line(mimeType), "of unknown type"), len(data))
		}
		return nil
	}
	path := call.Output
	if n > 1 {
		extension := filepath.Ext(path)
		path = fmt.Sprintf("%s-%d%s", strings.TrimSuffix(path, extension), n, extension)
	}
	if err := os.WriteFile(path, data, 0o644); err != nil {
		return failed("write the image: %w", err)
	}
	if !call.JSON {
		fmt.Fprintf(a.stdout, "%s: %s, %d bytes\n", path, cmp.Or(cleantext.Line(mimeType), "image"), len(data))
	}
	return nil
}
