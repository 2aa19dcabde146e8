"""Programs of few numbers, or with little between them, and what each is: see `test_met.py`."""

from __future__ import annotations

WRONG = {
    "a root, and a model that is one number": (
        ("loss", "function-of-mean"),
        """
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.tensor(0.3))

            def forward(self, x):
                return x[:, :1] * self.scale

        model, optimizer = trained(Scaled())
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y[:, None].double()).sqrt().backward()
            optimizer.step()
        """,
    ),
    "counts that hardly differ": (
        ("loss", "count"),
        """
        model, optimizer = trained(nn.Linear(6, 4))
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y, weight=torch.tensor([1, 1.0001, 1.0003, 1.0007])).backward()
            optimizer.step()
        """,
    ),
    "a mean in one pass, and a sum in another": (
        ("loss", "sum"),
        """
        model, optimizer = trained(nn.Linear(6, 4))
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            model(-x).square().sum().backward()
            optimizer.step()
        """,
    ),
}
