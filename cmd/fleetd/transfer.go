package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
)

type importCmd struct {
	File          string `arg:"" help:"CSV file with a header, or NDJSON; - reads standard input."`
	Partial       bool   `help:"Import the lines without a fault. Without it one fault refuses the whole file."`
	ReplaceClient bool   `help:"Let a line change the client of a member, and admit a device that was revoked."`
	jsonFlags
}

// Run sends the file and prints the result.
func (cmd *importCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	in, err := input(a.stdin, cmd.File)
	if err != nil {
		return failed("%w", err)
	}
	defer in.Close()
	size := int64(-1)
	if f, isFile := in.(*os.File); isFile {
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
			size = info.Size()
		}
	}
	// The buffer only serves to see the first byte; a read from it is otherwise one of the file.
	buffered := bufio.NewReader(in)
	format, err := fileFormat(cmd.File, buffered)
	if err != nil {
		return err
	}
	report, err := c.ImportDevices(ctx, buffered, apiclient.ImportOptions{Format: format, Size: size, Partial: cmd.Partial, ReplaceClient: cmd.ReplaceClient})
	for _, fault := range report.Faults {
		at := fmt.Sprintf("%d:%d", fault.Line, fault.Column)
		if fault.Column == 0 {
			at = fmt.Sprint(fault.Line)
		}
		fmt.Fprintf(a.stderr, "%s: %s\n", at, cleantext.Line(fault.Detail))
	}
	if more := report.Refused - int64(len(report.Faults)); more > 0 {
		fmt.Fprintf(a.stderr, "and %d more\n", more)
	}
	if err != nil {
		if len(report.Faults) > 0 {
			return fmt.Errorf("nothing was imported; correct these lines, or import the others with --partial: %w", err)
		}
		return err
	}
	if cmd.JSON {
		return printValue(a.stdout, report)
	}
	return printImport(a.stdout, report)
}

// input opens a file; - is standard input.
func input(stdin io.Reader, name string) (io.ReadCloser, error) {
	if name == "-" {
		return io.NopCloser(stdin), nil
	}
	return os.Open(name)
}

// fileFormat finds the format by the file's name, else by its first byte.
func fileFormat(name string, content *bufio.Reader) (string, error) {
	if format := formatOf(name); format != "" {
		return format, nil
	}
	start, err := content.Peek(512)
	if err != nil && !errors.Is(err, io.EOF) {
		return "", failed("read the devices: %w", err)
	}
	switch start = bytes.TrimLeft(start, "\uFEFF \t\r\n"); {
	case len(start) == 0:
		return "", failed("there are no devices in %s", cmp.Or(strings.TrimPrefix(name, "-"), "standard input"))
	case start[0] == '{':
		return apiclient.FormatNDJSON, nil
	}
	return apiclient.FormatCSV, nil
}

// formatOf returns the format by the name of a file; empty if the name has no known ending.
func formatOf(name string) string {
	switch strings.ToLower(filepath.Ext(name)) {
	case ".csv":
		return apiclient.FormatCSV
	case ".ndjson", ".jsonl":
		return apiclient.FormatNDJSON
	}
	return ""
}

func printImport(w io.Writer, r api.ImportReport) error {
	text := fmt.Sprintf("%d rows: %d created, %d changed, %d unchanged", r.Rows, r.Created, r.Changed, r.Unchanged)
	if r.Refused > 0 {
		text += fmt.Sprintf(", %d not imported", r.Refused)
	}
	if r.FirstClients > 0 {
		text += fmt.Sprintf("\n%d rows have no client_id: the first client that comes with one of these ids is admitted", r.FirstClients)
	}
	_, err := fmt.Fprintln(w, text)
	return err
}

type exportCmd struct {
	Select  string `arg:"" optional:"" name:"select" help:"Only devices of this selection, such as room=lab."`
	Output  string `short:"o" help:"File to write; one that exists is replaced only by a complete export. Without it, standard output." placeholder:"FILE"`
	Secrets bool   `help:"Include the Client-Ids of the devices, by which they get their credentials; needs an admin token or key."`
	Format  string `help:"csv or ndjson; without it, by the ending of the file, else csv." placeholder:"csv|ndjson" values:"csv,ndjson"`
	clientFlags
}

// Run copies the devices.
func (cmd *exportCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	format := cmp.Or(cmd.Format, formatOf(cmd.Output), apiclient.FormatCSV)
	if format != apiclient.FormatCSV && format != apiclient.FormatNDJSON {
		return failed("--format must be csv or ndjson, not %q", cmd.Format)
	}
	query := apiclient.Query{"format": format, "select": cmd.Select}
	if cmd.Secrets {
		query["secrets"] = "true"
	}
	err := a.save(cmd.Output, func(w io.Writer) (int64, error) { return c.Download(ctx, w, query, "devices", "export") })
	if err == nil && !cmd.Secrets {
		fmt.Fprintln(a.stderr, "this export has no client_id: an import of it admits, for each device that it creates, the first client that comes with the device's id; --secrets includes them")
	}
	return err
}

// save has a file written beside its place and renamed, so that a transfer that breaks off leaves what was there. An
// empty name or - is standard output.
func (a *app) save(name string, write func(io.Writer) (int64, error)) error {
	if name == "" || name == "-" {
		_, err := write(a.stdout)
		return err
	}
	size, err := writeFile(name, write)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(a.stdout, "%s: %s\n", name, sizeText(size))
	return err
}

func writeFile(name string, write func(io.Writer) (int64, error)) (size int64, err error) {
	// A link stays one, and a pipe or a device is not replaced by a file.
	if target, err := filepath.EvalSymlinks(name); err == nil {
		name = target
	}
	if info, err := os.Stat(name); err == nil && !info.Mode().IsRegular() {
		f, err := os.OpenFile(name, os.O_WRONLY, 0)
		if err != nil {
			return 0, failed("%w", err)
		}
		defer f.Close()
		return write(f)
	}
	temp, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".*") // mode 0600
	if err != nil {
		return 0, failed("write %s: %w", name, errors.Unwrap(err)) // without the name of the temporary file
	}
	size, err = write(temp)
	if err == nil {
		err = temp.Sync()
	}
	if closeErr := temp.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(temp.Name(), name)
	}
	if err != nil {
		_ = os.Remove(temp.Name()) // the error that led here has the cause
		return size, err
	}
	return size, nil
}
