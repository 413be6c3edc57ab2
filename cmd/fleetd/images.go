package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
	"fleetd/internal/firmware"
	"fleetd/internal/preflight"
)

type firmwareListCmd struct {
	Version   string `help:"Only images with this version." placeholder:"VERSION"`
	Board     string `help:"Only images for this board." placeholder:"BOARD"`
	listFlags `set:"per=, one image per line"`
}

// Run prints the images.
func (cmd *firmwareListCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	return printList(ctx, a, a.stdout, c, cmd.listFlags, []string{"IMAGE", "FIRMWARE", "BOARDS", "CHIP", "SIZE", "DEVICES", "ADDED", "NOTE"}, "no firmware images; `fleetd firmware add` adds some", func(x api.FirmwareImage) []string {
		running := "-"
		if x.Devices != nil {
			running = fmt.Sprint(*x.Devices)
		}
		return []string{shortID(x.ID), x.Project + " " + x.Version, cmp.Or(strings.Join(x.Boards, ","), "-"), x.Chip, sizeText(x.Size), running, timeCell(x.AddedAt), x.Note}
	}, apiclient.Query{"version": cmd.Version, "board": cmd.Board}, "firmware")
}

// shortID is as much of an image's SHA-256 as names it.
func shortID(id string) string { return id[:min(len(id), firmware.Digits)] }

type firmwareAddCmd struct {
	Files  []string `arg:"" name:"file" help:"Application image, merged binary, or zip of a release. A signature in FILE.minisig is sent along."`
	Note   string   `help:"A note for people." placeholder:"TEXT"`
	DryRun bool     `help:"Only say what would be added."`
	jsonFlags
}

// Run adds the images of the files, one file after the other.
func (cmd *firmwareAddCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	unfit := 0
	for _, name := range cmd.Files {
		err := cmd.add(ctx, a, c, name)
		problem := (*apiclient.Problem)(nil)
		if errors.As(err, &problem) && problem.Code == "image_invalid" && !cmd.JSON {
			unfit++
			fmt.Fprintf(a.stdout, "%s: not added\n", cleantext.Line(name))
			err = aligned(a.stdout, "  ", findingRows(problem.Findings), 0)
		}
		if err != nil {
			return err
		}
	}
	return refusedFiles(unfit)
}

func (cmd *firmwareAddCmd) add(ctx context.Context, a *app, c *apiclient.Client, name string) error {
	f, err := os.Open(name)
	if err != nil {
		return failed("%w", err)
	}
	defer f.Close()
	query := apiclient.Query{"note": cmd.Note}
	if cmd.DryRun {
		query["dry_run"] = "true"
	}
	sum := sha256.New()
	size, err := io.Copy(sum, f)
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err == nil {
		query["sha256"] = hex.EncodeToString(sum.Sum(nil))
		query["signature"], err = signatureOf(name)
	}
	if err != nil {
		return failed("%w", err)
	}
	added, fresh, err := c.AddFirmware(ctx, f, size, query)
	if err != nil {
		return err
	}
	if cmd.JSON {
		return printJSONLine(a.stdout, added.Raw)
	}
	done := "nothing new"
	if fresh {
		done = "added"
	} else if cmd.DryRun {
		done = "fit"
	}
	fmt.Fprintf(a.stdout, "%s: %s, %s\n", cleantext.Line(name), count(len(added.Value.Items), "image"), done)
	rows := [][]string{}
	for _, x := range added.Value.Items {
		rows = append(rows, []string{shortID(x.ID), x.Project + " " + x.Version, cmp.Or(strings.Join(x.Boards, ", "), "-"), x.Chip, sizeText(x.Size)})
	}
	return aligned(a.stdout, "  ", rows, 0)
}

// signatureOf returns the second line of the signature that minisign writes beside a file; empty if there is none.
func signatureOf(name string) (string, error) {
	content, err := os.ReadFile(name + ".minisig")
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	lines := strings.Split(string(content), "\n")
	if len(lines) < 2 {
		return "", fmt.Errorf("%s.minisig is no signature of minisign", name)
	}
	return strings.TrimSpace(lines[1]), nil
}

type firmwareShowCmd struct {
	Image string `arg:"" help:"SHA-256 of the image, or its first 12 digits."`
	jsonFlags
}

// Run prints one image.
func (cmd *firmwareShowCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	return printAnswer(ctx, a, c, cmd.JSON, func(x api.FirmwareImage) error {
		rows := append(imageRows(&x), []string{"Added", cmp.Or(utcText(x.AddedAt), "-") + " by " + cmp.Or(x.AddedBy, "-")})
		if x.Note != "" {
			rows = append(rows, []string{"Note", x.Note})
		}
		if x.Devices != nil {
			rows = append(rows, []string{"Devices", fmt.Sprint(*x.Devices)})
		}
		return aligned(a.stdout, "", rows, 0)
	}, nil, "firmware", cmd.Image)
}

type firmwareRemoveCmd struct {
	Image string `arg:"" help:"SHA-256 of the image, or its first 12 digits."`
	Force bool   `help:"Delete it although devices run it or ran it last."`
	yesFlag
	clientFlags
}

// Run deletes one image.
func (cmd *firmwareRemoveCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	if err := cmd.ask(a, "Delete the firmware image "+cmd.Image+"?"); err != nil {
		return err
	}
	r := apiclient.Request{Method: http.MethodDelete, Path: []string{"firmware", cmd.Image}}
	if cmd.Force {
		r.Query = apiclient.Query{"force": "true"}
	}
	_, err := apiclient.Send[struct{}](ctx, c, r)
	return a.change(cmd.Image, "deleted", err)
}

type firmwareCheckCmd struct {
	What   string `arg:"" name:"release|image" help:"Version, PROJECT@VERSION, or the first 12 digits of an image."`
	Select string `arg:"" optional:"" name:"select" help:"Only devices of this selection, such as room=lab."`
	listFlags
}

// Run prints the counts and the devices that would not get the image.
func (cmd *firmwareCheckCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	query := apiclient.Query{"release": cmd.What, "select": cmd.Select}
	if firmware.IsID(cmd.What) {
		query = apiclient.Query{"image": cmd.What, "select": cmd.Select}
	}
	rows := [][]string{{"DEVICE", "BOARD", "FIRMWARE", "IMAGE", "VERDICT", "WHY"}}
	left := cmd.Limit
	for page, err := range apiclient.Pages[apiclient.Answer[api.FirmwareCheck]](ctx, c, func(p apiclient.Answer[api.FirmwareCheck]) string { return p.Value.NextCursor }, query, "firmware", "check") {
		switch {
		case err != nil:
			return err
		case cmd.JSON:
			if err := printJSONLine(a.stdout, page.Raw); err != nil {
				return err
			}
		case page.Value.Counts != nil:
			if err := printCounts(a, page.Value.Counts); err != nil {
				return err
			}
		}
		for _, v := range page.Value.Items {
			rows = append(rows, []string{v.Device, cmp.Or(v.Board, "-"), cmp.Or(v.Firmware, "-"), cmp.Or(shortID(v.Image), "-"), v.Verdict, codesOf(v.Findings)})
			if left--; left == 0 {
				break
			}
		}
		if left == 0 && cmd.Limit > 0 {
			break
		}
	}
	if cmd.JSON || len(rows) == 1 {
		return nil
	}
	fmt.Fprintln(a.stdout)
	return a.table(a.stdout, "", rows)
}

func printCounts(a *app, counts *api.FirmwareCounts) error {
	rows := [][]string{{"Devices", fmt.Sprint(counts.Devices)}}
	for _, verdict := range preflight.Verdicts {
		rows = append(rows, []string{"  " + string(verdict), fmt.Sprint(counts.Verdicts[string(verdict)])})
	}
	for _, code := range slices.Sorted(maps.Keys(counts.Findings)) {
		rows = append(rows, []string{"Finding " + code, fmt.Sprint(counts.Findings[code])})
	}
	return aligned(a.stdout, "", rows, 0)
}

// codesOf are the codes of findings, the grave ones first.
func codesOf(findings []api.FirmwareFinding) string {
	var codes []string
	for _, severity := range []string{"error", "wait", "warning"} {
		for _, f := range findings {
			if f.Severity == severity {
				codes = append(codes, f.Code)
			}
		}
	}
	return strings.Join(codes, ", ")
}

type firmwareExplainCmd struct {
	Device string `device:"name" arg:"" help:"Id or name of the device."`
	Image  string `help:"Could the device get this image? First 12 digits of its SHA-256." placeholder:"IMAGE"`
	jsonFlags
}

// Run prints what a device runs and could get.
func (cmd *firmwareExplainCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	return printAnswer(ctx, a, c, cmd.JSON, func(d api.DeviceFirmware) error {
		rows := [][]string{{"Device", d.Device}, {"Board", cmp.Or(d.Board, "-")}, {"Firmware", cmp.Or(d.Firmware, "-")}, {"ELF", cmp.Or(d.ELF, "-")}, {"Image", cmp.Or(shortID(d.Image), "not stored")}}
		if f := d.Facts; f != nil {
			rows = append(rows, []string{"Project", cmp.Or(f.Project, "-")}, []string{"Compiled", cmp.Or(f.CompileTime, "-")}, []string{"Chip", "revision " + f.ChipRevision}, []string{"Flash", sizeText(f.FlashSize)},
				[]string{"Slot", cmp.Or(f.Slot, "-")}, []string{"Layout", layoutText(f.Layout)}, []string{"Display", cmp.Or(f.Display, "-")})
		}
		for i, h := range d.History {
			label := ""
			if i == 0 {
				label = "History"
			}
			rows = append(rows, []string{label, timeCell(h.At) + "  " + cmp.Or(h.Version, "-") + "  " + shortID(h.ELF) + "  " + cmp.Or(h.Cause, "first known")})
		}
		if d.Check != nil {
			rows = append(rows, []string{"Verdict", d.Check.Verdict})
			for _, f := range d.Check.Findings {
				rows = append(rows, []string{map[string]string{"error": "Blocks", "wait": "Waits", "warning": "Warning"}[f.Severity], f.Text + " (" + f.Code + ")"})
			}
		}
		if d.Bar != "" {
			rows = append(rows, []string{"Barred", d.Bar})
		}
		if t := d.Last; t != nil {
			is := []string{cmp.Or(phaseText(t.Firmware), strings.TrimSpace(t.State+" "+t.Reason))}
			if t.Outcome != "" {
				is = []string{t.Outcome, timeCell(t.EndedAt)}
			}
			for _, why := range []string{t.Code, t.Detail} {
				if why != "" {
					is = append(is, why)
				}
			}
			rows = append(rows, []string{"Rollout", "job " + t.Job + ": " + strings.Join(is, ", ")})
		}
		return aligned(a.stdout, "", rows, 0)
	}, apiclient.Query{"image": cmd.Image}, "devices", cmd.Device, "firmware")
}
